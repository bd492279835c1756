/* Generates token ids in C, also from bundles without a tokenizer: generate_tokens BUNDLE
 * NEW_TOKENS [ID...] Prints the generated ids on one line to stdout, and the passes and seconds to
 * stderr. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "dlm_runtime.h"

/* Reads a whole number that fits int32_t. Returns 0 if the text is anything else. */
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

int main(int argc, char** argv) {
  dlm_request request;
  dlm_request_init(
      &request, sizeof request); /* the bundle's default preset; request.policy chooses another */
  if (argc < 3 || !read_int32(argv[2], &request.max_new_tokens) || request.max_new_tokens < 0) {
    fprintf(stderr, "usage: generate BUNDLE NEW_TOKENS [ID...]\n");
    return 2;
  }
  const size_t count = (size_t)argc - 3;
  char message[1024] = "no memory for the tokens";
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const dlm_result* result = NULL;
  dlm_status status = DLM_OUT_OF_MEMORY;
  int32_t* tokens = calloc(count + 1, sizeof *tokens); /* at least 1 element */
  for (size_t i = 0; tokens != NULL && i < count; ++i) {
    if (read_int32(argv[3 + i], &tokens[i])) continue;
    fprintf(stderr, "generate: \"%s\" is not a token id\n", argv[3 + i]);
    free(tokens);
    return 2;
  }
  if (tokens != NULL) status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &bundle);
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status != DLM_OK) report(status, message);
  if (status == DLM_OK) {
    request.tokens = count > 0 ? tokens : NULL;
    request.token_count = count;
    status = dlm_session_generate(session, &request, &result);
    if (status != DLM_OK) report(status, dlm_session_last_error(session));
  }
  if (status == DLM_OK) {
    for (size_t i = count; i < result->length; ++i)
      printf("%s%d", i == count ? "" : " ", (int)result->tokens[i]);
    printf("\n");
    fprintf(stderr, "%d passes, %.3f s\n", (int)result->stats->nfe, result->stats->total_s);
  }
  dlm_session_destroy(session); /* must be destroyed before its bundle */
  dlm_bundle_destroy(bundle);
  free(tokens);
  return status == DLM_OK ? 0 : 1;
}
