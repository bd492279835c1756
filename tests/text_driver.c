/* Walks the calls for text of dlm_runtime.h down their error paths and through their promises: text_driver BUNDLE
 * BUNDLE is the demo's, which has a tokenizer and a chat template. Prints "N passed, N failed"; the exit status is 1 if one failed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

static int passed = 0, failed = 0;
static char why[512];

static void claim(int holds, const char *what, int line) {
  if (holds) ++passed;
  else ++failed, printf("text_driver.c:%d: failed: %s (%s)\n", line, what, why);
}
#define CLAIM(condition) claim((condition) != 0, #condition, __LINE__)
#define REFUSED(call, status, says) CLAIM((call) == (status) && strstr(why, says) != NULL)
#define WHY why, sizeof why

static const char PROMPT[] = "turn on the kitchen lights";
enum { ROOM = 512 };

static void test_null_is_refused_by_name(dlm_bundle *bundle, const dlm_text *text) {
  const dlm_text *none = NULL;
  dlm_text *made = (dlm_text *)-1;
  dlm_decoder *decoder = (dlm_decoder *)-1;
  const dlm_message nobody = {NULL, "x", 1}, nothing = {"user", NULL, 1};
  int32_t tokens[4] = {0};
  const char *string = PROMPT;
  char out[4];
  size_t size = 7;
  REFUSED(dlm_bundle_text(NULL, WHY, &none), DLM_INVALID_ARGUMENT, "bundle is NULL");
  REFUSED(dlm_bundle_text(bundle, WHY, NULL), DLM_INVALID_ARGUMENT, "text is NULL");
  REFUSED(dlm_text_read(NULL, 4, WHY, &made), DLM_INVALID_ARGUMENT, "data is NULL");
  CLAIM(made == NULL);
  REFUSED(dlm_text_read("", 0, WHY, &made), DLM_BAD_BUNDLE, "not a compiled text file");
  REFUSED(dlm_text_encode(NULL, PROMPT, 3, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "text is NULL");
  CLAIM(size == 0);
  REFUSED(dlm_text_encode(text, NULL, 3, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "string is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 0, WHY, NULL, 4, &size), DLM_INVALID_ARGUMENT, "tokens is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 0, WHY, tokens, 4, NULL), DLM_INVALID_ARGUMENT, "count is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, (size_t)1 << 29, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "at most");
  REFUSED(dlm_text_decode(text, NULL, 4, WHY, out, 4, &size), DLM_INVALID_ARGUMENT, "tokens is NULL");
  REFUSED(dlm_text_decode(text, tokens, 4, WHY, NULL, 4, &size), DLM_INVALID_ARGUMENT, "string is NULL");
  REFUSED(dlm_text_decode(text, tokens, 4, WHY, out, 4, NULL), DLM_INVALID_ARGUMENT, "size is NULL");
  REFUSED(dlm_decoder_create(NULL, WHY, &decoder), DLM_INVALID_ARGUMENT, "text is NULL");
  CLAIM(decoder == NULL);
  CLAIM(dlm_decoder_push(NULL, tokens, 1, 0, &string, &size) == DLM_INVALID_ARGUMENT && string == NULL && size == 0);
  REFUSED(dlm_chat_render(text, NULL, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT, "messages is NULL");
  REFUSED(dlm_chat_render(text, &nobody, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT, "role is NULL");
  REFUSED(dlm_chat_render(text, &nothing, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT, "content is NULL");
  REFUSED(dlm_chat_render(text, &nothing, 0, WHY, out, 4, &size), DLM_INVALID_ARGUMENT, "no messages");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 4, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "flags = 4");
  REFUSED(dlm_chat_encode(text, &nothing, 1, DLM_ENCODE_PROMPT, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "flags = 1");
  REFUSED(dlm_chat_encode(text, &nobody, 1, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT, "role is NULL");
  CLAIM(dlm_text_encode(text, PROMPT, 3, 0, NULL, 0, tokens, 4, &size) == DLM_OK && size > 0);
  dlm_text_destroy(NULL);
  dlm_decoder_destroy(NULL);
}

static void test_short_buffers_are_filled_and_the_rest_is_told(const dlm_text *text) {
  int32_t all[ROOM], some[3] = {-1, -1, -1};
  size_t count = 0, few = 0, size = 0;
  char whole[ROOM], part[6] = "......";
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, all, ROOM, &count) == DLM_OK && count > 3 && count < ROOM);
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, NULL, 0, &few) == DLM_OK && few == count);
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, some, 2, &few) == DLM_OK && few == count);
  CLAIM(some[0] == all[0] && some[1] == all[1] && some[2] == -1);
  CLAIM(dlm_text_decode(text, all, count, WHY, whole, ROOM, &size) == DLM_OK && size == strlen(PROMPT));
  CLAIM(memcmp(whole, PROMPT, size) == 0);
  CLAIM(dlm_text_decode(text, all, count, WHY, part, 5, &size) == DLM_OK && memcmp(part, "turn .", 6) == 0);
  const dlm_message message = {"user", PROMPT, strlen(PROMPT)};
  CLAIM(dlm_chat_render(text, &message, 1, WHY, whole, ROOM, &size) == DLM_OK && size > strlen(PROMPT) && size < ROOM);
  CLAIM(dlm_text_encode(text, whole, size, DLM_ENCODE_SPECIAL, WHY, some, 3, &few) == DLM_OK && few == count && some[2] == all[2]);
  CLAIM(dlm_text_encode(text, whole, size, 0, WHY, NULL, 0, &few) == DLM_OK && few > count);
  CLAIM(dlm_chat_encode(text, &message, 1, 0, WHY, some, 3, &few) == DLM_OK && few == count && some[2] == all[2]);
  CLAIM(dlm_text_encode(text, "a\0b", 3, 0, WHY, some, 3, &few) == DLM_OK && few == 3);
}

struct told {
  dlm_session *session;
  int32_t calls, stop_at, steps;
  dlm_status inner;
  char text[ROOM];
};

static int32_t on_text(void *user, const char *delta, size_t size) {
  struct told *told = user;
  const char *text;
  size_t length;
  dlm_generate_options options;
  dlm_generate_options_init(&options);
  told->inner = dlm_generate_text(told->session, &options, "x", 1, NULL, NULL, &text, &length);
  CLAIM(size > 0 && delta[size] == '\0' && strlen(told->text) + size < sizeof told->text);
  strcat(told->text, delta);
  return ++told->calls == told->stop_at;
}

static int32_t on_step(void *user, const dlm_step *step) {
  ((struct told *)user)->steps += step->nfe > 0;
  return 0;
}

static void test_generating(dlm_bundle *bundle) {
  dlm_session *session = NULL;
  CLAIM(dlm_session_create(bundle, WHY, &session) == DLM_OK);
  struct told told = {session, 0, 0, 0, DLM_OK, ""};
  dlm_generate_options options;
  dlm_generate_options_init(&options);
  options.max_new_tokens = 48;
  options.on_step = on_step;
  options.user = &told;
  const char *text = NULL;
  size_t size = 0;
  CLAIM(dlm_generate_text(session, &options, PROMPT, strlen(PROMPT), on_text, &told, &text, &size) == DLM_OK);
  CLAIM(size > 0 && strlen(text) == size && strcmp(text, told.text) == 0 && told.calls > 0 && told.steps > 0);
  CLAIM(told.inner == DLM_INVALID_ARGUMENT); /* a callback may not use the session that called it */
  dlm_result result = {0};
  CLAIM(dlm_session_result(session, 0, &result) == DLM_OK && result.nfe == told.steps && result.prompt_tokens > 0);
  const dlm_message message = {"user", PROMPT, strlen(PROMPT)};
  CLAIM(dlm_generate_chat(session, &options, &message, 1, NULL, NULL, &text, &size) == DLM_OK && strcmp(text, told.text) == 0);
  told.stop_at = told.calls + 1;
  told.text[0] = '\0';
  CLAIM(dlm_generate_text(session, &options, PROMPT, strlen(PROMPT), on_text, &told, &text, &size) == DLM_CANCELLED);
  CLAIM(text == NULL && size == 0);
  CLAIM(dlm_generate_text(session, NULL, "x", 1, NULL, NULL, &text, &size) == DLM_INVALID_ARGUMENT);
  CLAIM(strcmp(dlm_session_last_error(session), "options is NULL") == 0);
  CLAIM(dlm_generate_text(session, &options, "x", 1, NULL, NULL, NULL, &size) == DLM_INVALID_ARGUMENT);
  CLAIM(dlm_generate_text(session, &options, "\xff", 1, NULL, NULL, &text, &size) == DLM_INVALID_ARGUMENT);
  CLAIM(dlm_generate_text(NULL, &options, "x", 1, NULL, NULL, &text, &size) == DLM_INVALID_ARGUMENT);
  dlm_generate_options_init(&options);
  CLAIM(options.max_new_tokens == DLM_DEFAULT_NEW_TOKENS);
  CLAIM(dlm_generate_text(session, &options, PROMPT, strlen(PROMPT), NULL, NULL, &text, &size) == DLM_OK);
  char by_default[4096];
  CLAIM(size > 0 && size < sizeof by_default);
  memcpy(by_default, text, size + 1);
  options.max_new_tokens = dlm_bundle_max_new_tokens(bundle);
  CLAIM(dlm_generate_text(session, &options, PROMPT, strlen(PROMPT), NULL, NULL, &text, &size) == DLM_OK);
  CLAIM(strcmp(text, by_default) == 0); /* the length is the bundle's own */
  options.max_new_tokens = 0;
  CLAIM(dlm_generate_text(session, &options, PROMPT, strlen(PROMPT), NULL, NULL, &text, &size) == DLM_OK);
  CLAIM(dlm_session_result(session, 0, &result) == DLM_OK && result.nfe == 0); /* 0 stays 0 */
  options.max_new_tokens = -2;
  CLAIM(dlm_generate_text(session, &options, "x", 1, NULL, NULL, &text, &size) == DLM_INVALID_ARGUMENT);
  CLAIM(strstr(dlm_session_last_error(session), "is negative") != NULL);
  dlm_session_destroy(session);
}

static void *encode_often(void *user) {
  const dlm_text *text = NULL;
  size_t sum = 0, count;
  if (dlm_bundle_text(user, NULL, 0, &text) != DLM_OK) return NULL;
  for (size_t i = 0; i < 200; ++i)
    if (dlm_text_encode(text, PROMPT, i % strlen(PROMPT), 1, NULL, 0, NULL, 0, &count) == DLM_OK) sum += count;
  return (void *)sum;
}

static void test_threads_share_a_text(dlm_bundle *bundle) {
  pthread_t threads[4];
  void *sums[4];
  for (size_t i = 0; i < 4; ++i) CLAIM(pthread_create(&threads[i], NULL, encode_often, bundle) == 0);
  for (size_t i = 0; i < 4; ++i) CLAIM(pthread_join(threads[i], &sums[i]) == 0 && sums[i] != NULL && sums[i] == sums[0]);
}

int main(int argc, char **argv) {
  dlm_bundle *bundle = NULL;
  const dlm_text *text = NULL;
  dlm_decoder *decoder = NULL;
  if (argc != 2 || dlm_bundle_open(argv[1], NULL, WHY, &bundle) != DLM_OK) return fprintf(stderr, "%s\n", why), 2;
  test_threads_share_a_text(bundle); /* first: each of them may be the one that reads the file */
  CLAIM(dlm_bundle_text(bundle, WHY, &text) == DLM_OK);
  test_null_is_refused_by_name(bundle, text);
  test_short_buffers_are_filled_and_the_rest_is_told(text);
  test_generating(bundle);
  CLAIM(dlm_decoder_create(text, WHY, &decoder) == DLM_OK);
  dlm_bundle_destroy(bundle);
  const char *string = NULL;
  size_t size = 0;
  const int32_t tokens[] = {-5, 100, 1 << 30, 101};
  CLAIM(dlm_decoder_push(decoder, tokens, 4, 1, &string, &size) == DLM_OK && strlen(string) == size && size > 0);
  dlm_decoder_destroy(decoder);
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
