/* Answers many prompts with one bundle, to compare processors. Usage:
 *   prompts_driver BUNDLE PRESET NEW_TOKENS LOGITS < PROMPTS
 * For each line of stdin, prints a line with the number of passes and the text. Also writes the
 * logits of each prompt's first pass to the file LOGITS, as float32 [new tokens, vocabulary]. Uses
 * one thread, so that sums are always added in the same order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

enum { LINE = 4096, MOST_TOKENS = 2048 };

static int fail(const char* sentence) {
  fprintf(stderr, "prompts_driver: %s\n", sentence);
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 5) return fail("usage: prompts_driver BUNDLE PRESET NEW_TOKENS LOGITS");
  char why[1024] = "", line[LINE];
  dlm_open_options how;
  dlm_open_options_init(&how, sizeof how);
  how.threads = 1;
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy);
  request.policy = &policy;
  request.text = DLM_TEXT_RESULT;
  request.max_new_tokens = atoi(argv[3]);
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  const dlm_text* encoder = NULL;
  if (dlm_bundle_open(argv[1], &how, why, sizeof why, &bundle) ||
      dlm_session_create(bundle, why, sizeof why, &session) ||
      dlm_bundle_text(bundle, why, sizeof why, &encoder) ||
      dlm_bundle_policy(bundle, argv[2], NULL, why, sizeof why, &policy))
    return fail(why);
  fprintf(stderr, "%s\n", dlm_bundle_describe(bundle)->engine);
  const dlm_denoiser* about = dlm_bundle_describe(bundle)->denoiser;
  const size_t masks = (size_t)request.max_new_tokens, floats = masks * (size_t)about->vocab_size;
  float* logits = malloc(floats * sizeof *logits);
  int32_t *tokens = malloc(MOST_TOKENS * sizeof *tokens), *rows = malloc(masks * sizeof *rows);
  FILE* out = fopen(argv[4], "wb");
  if (logits == NULL || tokens == NULL || rows == NULL || out == NULL)
    return fail("no memory, or no file for logits");
  while (fgets(line, sizeof line, stdin) != NULL) {
    const size_t size = strcspn(line, "\n");
    size_t given = 0;
    const dlm_result* result = NULL;
    request.prompt = line;
    request.prompt_size = size;
    if (dlm_text_encode(encoder, line, size, 0, why, sizeof why, tokens, MOST_TOKENS, &given))
      return fail(why);
    if (given + masks > MOST_TOKENS) return fail("the prompt is too long");
    for (size_t i = 0; i < masks; ++i) {
      tokens[given + i] = about->mask_token_id;
      rows[i] = (int32_t)(given + i);
    }
    if (dlm_session_logits(session, tokens, given + masks, rows, masks, logits, floats) ||
        fwrite(logits, sizeof *logits, floats, out) != floats ||
        dlm_session_generate(session, &request, &result))
      return fail(dlm_session_last_error(session));
    printf("%d %s\n", (int)result->stats->nfe, result->text);
    fflush(stdout);
  }
  free(logits);
  free(tokens);
  free(rows);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  return fclose(out) == 0 ? 0 : fail("the file of logits");
}
