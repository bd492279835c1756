/* Times a bundle's first token in a cold process. first_token.py runs it:
 *   first_token BUNDLE CHECK_HASHES PROMPT NEW_TOKENS THREADS STARTED_NS
 * STARTED_NS is CLOCK_MONOTONIC just before this process was created. Prints one JSON object. It
 * contains four times in milliseconds since STARTED_NS: when main began, when the bundle was open,
 * when the first pass ended, and when the first token was committed. It also contains the number of
 * passes until the first token was committed, and the resident memory in KiB, separately for
 * anonymous memory and for mapped files. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dlm_runtime.h"

static double ms_since(int64_t started) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec - started) / 1e6;
}

/* Returns the number in a line of /proc/self/status, in KiB. Returns -1 if there is no such
 * line. */
static long status_kib(const char* name) {
  FILE* const file = fopen("/proc/self/status", "r");
  char line[256];
  long found = -1;
  while (file != NULL && found < 0 && fgets(line, sizeof line, file) != NULL)
    if (strncmp(line, name, strlen(name)) == 0) found = strtol(line + strlen(name), NULL, 10);
  if (file != NULL) fclose(file);
  return found;
}

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const int64_t started = strtoll(argv[6], NULL, 10);
  const double began = ms_since(started);
  const size_t count = (size_t)atoi(argv[3]);
  char message[1024] = "";
  dlm_open_options open_options;
  dlm_open_options_init(&open_options, sizeof open_options);
  open_options.check_hashes = atoi(argv[2]);
  open_options.threads = atoi(argv[5]);
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.max_new_tokens = atoi(argv[4]);
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const dlm_step* step = NULL;
  double first_pass = 0;
  int32_t* tokens = malloc((count + 1) * sizeof *tokens);
  for (size_t i = 0; tokens != NULL && i < count; ++i) tokens[i] = (int32_t)(i % 1000);
  request.tokens = tokens;
  request.token_count = count;
  dlm_status status = dlm_bundle_open(argv[1], &open_options, message, sizeof message, &bundle);
  const double opened = ms_since(started);
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status == DLM_OK) status = dlm_session_start(session, &request);
  /* A block-causal denoiser starts with a pass over the prompt. This pass commits no token. */
  do {
    if (status == DLM_OK) status = dlm_session_step(session, &step);
    if (first_pass == 0) first_pass = ms_since(started);
  } while (status == DLM_OK && step->committed == 0 && !step->done);
  const double first_token = ms_since(started);
  if (status != DLM_OK || step->committed == 0) {
    fprintf(stderr, "first_token: %s: %s%s\n", dlm_status_name(status), message,
            session == NULL ? "" : dlm_session_last_error(session));
    return 1;
  }
  printf(
      "{\"main\": %.3f, \"open\": %.3f, \"first_pass\": %.3f, \"first_token\": %.3f, "
      "\"passes\": %" PRId32 ", \"anonymous_kib\": %ld, \"file_kib\": %ld}\n",
      began, opened, first_pass, first_token, step->nfe, status_kib("RssAnon:"),
      status_kib("RssFile:"));
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  free(tokens);
  return 0;
}
