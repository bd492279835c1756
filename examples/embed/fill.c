/* Fills the masked tokens of a text in C: fill BUNDLE PASSES TEXT
 * TEXT contains the bundle's mask token, such as [MASK] or <mask>, once for each unknown token.
 * PASSES is the number of passes; 0 fills one mask token per pass. Prints the whole text to stdout,
 * and the number of passes and the seconds to stderr. README.md explains how to build this program.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

/* Reads an integer in 0..10000. Returns 0 if the text is something else. */
static int read_passes(const char* text, int32_t* value) {
  char* end = NULL;
  errno = 0;
  const long number = strtol(text, &end, 10);
  *value = (int32_t)number;
  return end != text && *end == '\0' && errno == 0 && number >= 0 && number <= 10000;
}

static void report(dlm_status status, const char* sentence) {
  fprintf(stderr, "fill: %s: %s\n", dlm_status_name(status), sentence);
}

int main(int argc, char** argv) {
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  if (argc != 4 || !read_passes(argv[2], &request.steps)) {
    fprintf(stderr, "usage: fill BUNDLE PASSES TEXT\n");
    return 2;
  }
  request.prompt = argv[3];
  request.prompt_size = strlen(argv[3]);
  request.special_tokens = 1; /* encode "[MASK]" in the text as the mask token, and not as ordinary
                                 text */
  request.max_new_tokens = 0; /* add no tokens after the text */
  request.text = DLM_TEXT_RESULT;
  char message[1024];
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const dlm_result* result = NULL;
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy);
  dlm_status status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &bundle);
  if (status == DLM_OK)
    status = dlm_bundle_policy(bundle, NULL, NULL, message, sizeof message, &policy);
  policy.block_length = 0; /* 0: the whole text is one block, so a pass may fill any mask token */
  request.policy = &policy;
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status != DLM_OK) report(status, message);
  if (status == DLM_OK) {
    status = dlm_session_generate(session, &request, &result);
    if (status != DLM_OK) report(status, dlm_session_last_error(session));
  }
  if (status == DLM_OK) {
    printf("%.*s\n", (int)result->text_size, result->text);
    fprintf(stderr, "%d passes, %.3f s\n", (int)result->stats->nfe, result->stats->total_s);
  }
  dlm_session_destroy(session); /* the session must be destroyed before its bundle */
  dlm_bundle_destroy(bundle);
  return status == DLM_OK ? 0 : 1;
}
