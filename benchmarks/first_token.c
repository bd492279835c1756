/* Milliseconds to a bundle's first committed tokens: first_token BUNDLE CHECK_HASHES PROMPT
 * NEW_TOKENS STARTED STARTED is CLOCK_MONOTONIC in ns just before this process was made. Prints ms
 * when main began, when the bundle was open and when the first pass had committed. first_token.py
 * runs it. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "dlm_runtime.h"

static double ms_since(int64_t started) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec - started) / 1e6;
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const int64_t started = strtoll(argv[5], NULL, 10);
  const double began = ms_since(started);
  const size_t count = (size_t)atoi(argv[3]);
  char message[1024] = "";
  dlm_open_options open_options;
  dlm_open_options_init(&open_options, sizeof open_options);
  open_options.check_hashes = atoi(argv[2]);
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.max_new_tokens = atoi(argv[4]);
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const dlm_step* step = NULL;
  int32_t* tokens = malloc(count * sizeof *tokens);
  for (size_t i = 0; tokens != NULL && i < count; ++i) tokens[i] = (int32_t)(i % 1000);
  request.tokens = tokens;
  request.token_count = count;
  dlm_status status = dlm_bundle_open(argv[1], &open_options, message, sizeof message, &bundle);
  const double opened = ms_since(started);
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status == DLM_OK) status = dlm_session_start(session, &request);
  if (status == DLM_OK) status = dlm_session_step(session, &step);
  if (status != DLM_OK || step->committed < 1) {
    fprintf(stderr, "first_token: %s: %s%s\n", dlm_status_name(status), message,
            dlm_session_last_error(session));
    return 1;
  }
  printf("%.3f %.3f %.3f\n", began, opened, ms_since(started));
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  free(tokens);
  return 0;
}
