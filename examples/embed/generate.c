/* Generates text from a bundle in C: generate BUNDLE NEW_TOKENS PROMPT
 * Prints what follows the prompt to stdout as it is decided, passes and seconds to stderr.
 * README.md says how to build it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

/* Reads a whole number that fits int32_t; returns 0 if text is anything else. */
static int read_int32(const char* text, int32_t* value) {
  char* end = NULL;
  errno = 0;
  const long number = strtol(text, &end, 10);
  *value = (int32_t)number;
  return end != text && *end == '\0' && errno == 0 && *value == number;
}

static void report(dlm_status status, const char* sentence) {
  fprintf(stderr, "generate: %s: %s\n", dlm_status_name(status), sentence);
}

/* Whole characters, each once; anything but 0 would end the request. */
static int32_t on_text(void* user, const char* delta, size_t size) {
  FILE* out = user;
  return fwrite(delta, 1, size, out) != size || fflush(out) != 0;
}

int main(int argc, char** argv) {
  dlm_generate_options options;
  dlm_generate_options_init(
      &options); /* the bundle's default preset; options.policy chooses another */
  if (argc != 4 || !read_int32(argv[2], &options.max_new_tokens) || options.max_new_tokens < 0) {
    fprintf(stderr, "usage: generate BUNDLE NEW_TOKENS PROMPT\n");
    return 2;
  }
  char message[1024];
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const char* text = NULL;
  size_t size = 0;
  dlm_status status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &bundle);
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status != DLM_OK) report(status, message);
  if (status == DLM_OK) {
    status = dlm_generate_text(session, &options, argv[3], strlen(argv[3]), on_text, stdout, &text,
                               &size);
    if (status != DLM_OK) report(status, dlm_session_last_error(session));
  }
  if (status == DLM_OK) {
    dlm_stats stats;
    dlm_session_stats(session, &stats);
    printf("\n");
    fprintf(stderr, "%d passes, %.3f s\n", (int)stats.nfe, stats.total_s);
  }
  dlm_session_destroy(session); /* before its bundle */
  dlm_bundle_destroy(bundle);
  return status == DLM_OK ? 0 : 1;
}
