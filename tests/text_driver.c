/* Tests the text functions of dlm_runtime.h, including all errors: text_driver BUNDLE BUNDLE must
 * be the demo bundle, which has a tokenizer and a chat template. Prints "N passed, N failed". The
 * exit code is 1 if a check failed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

static int passed = 0, failed = 0;
static char why[512];

static void claim(int holds, const char* what, int line) {
  if (holds)
    ++passed;
  else
    ++failed, printf("text_driver.c:%d: failed: %s (%s)\n", line, what, why);
}
#define CLAIM(condition) claim((condition) != 0, #condition, __LINE__)
#define REFUSED(call, status, says) CLAIM((call) == (status) && strstr(why, says) != NULL)
#define WHY why, sizeof why

static const char PROMPT[] = "turn on the kitchen lights";
enum { ROOM = 512 };

static void test_null_is_refused_by_name(dlm_bundle* bundle, const dlm_text* text) {
  const dlm_text* none = NULL;
  dlm_text* made = (dlm_text*)-1;
  const dlm_message nobody = {NULL, "x", 1}, nothing = {"user", NULL, 1};
  int32_t tokens[4] = {0};
  char out[4];
  size_t size = 7;
  REFUSED(dlm_bundle_text(NULL, WHY, &none), DLM_INVALID_ARGUMENT, "bundle is NULL");
  REFUSED(dlm_bundle_text(bundle, WHY, NULL), DLM_INVALID_ARGUMENT, "text is NULL");
  REFUSED(dlm_text_read(NULL, 4, WHY, &made), DLM_INVALID_ARGUMENT, "data is NULL");
  CLAIM(made == NULL);
  REFUSED(dlm_text_read("", 0, WHY, &made), DLM_BAD_BUNDLE, "not a compiled text file");
  REFUSED(dlm_text_encode(NULL, PROMPT, 3, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT,
          "text is NULL");
  CLAIM(size == 0);
  REFUSED(dlm_text_encode(text, NULL, 3, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT,
          "string is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 0, WHY, NULL, 4, &size), DLM_INVALID_ARGUMENT,
          "tokens is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 0, WHY, tokens, 4, NULL), DLM_INVALID_ARGUMENT,
          "count is NULL");
  REFUSED(dlm_text_encode(text, PROMPT, (size_t)1 << 29, 0, WHY, tokens, 4, &size),
          DLM_INVALID_ARGUMENT, "more than the limit");
  REFUSED(dlm_text_decode(text, NULL, 4, WHY, out, 4, &size), DLM_INVALID_ARGUMENT,
          "tokens is NULL");
  REFUSED(dlm_text_decode(text, tokens, 4, WHY, NULL, 4, &size), DLM_INVALID_ARGUMENT,
          "string is NULL");
  REFUSED(dlm_text_decode(text, tokens, 4, WHY, out, 4, NULL), DLM_INVALID_ARGUMENT,
          "size is NULL");
  REFUSED(dlm_chat_render(text, NULL, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT,
          "messages is NULL");
  REFUSED(dlm_chat_render(text, &nobody, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT,
          "role is NULL");
  REFUSED(dlm_chat_render(text, &nothing, 1, WHY, out, 4, &size), DLM_INVALID_ARGUMENT,
          "content is NULL");
  REFUSED(dlm_chat_render(text, &nothing, 0, WHY, out, 4, &size), DLM_INVALID_ARGUMENT,
          "no messages");
  REFUSED(dlm_text_encode(text, PROMPT, 3, 4, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT,
          "flags = 4");
  REFUSED(dlm_chat_encode(text, &nothing, 1, DLM_ENCODE_PROMPT, WHY, tokens, 4, &size),
          DLM_INVALID_ARGUMENT, "flags = 1");
  REFUSED(dlm_chat_encode(text, &nobody, 1, 0, WHY, tokens, 4, &size), DLM_INVALID_ARGUMENT,
          "role is NULL");
  CLAIM(dlm_text_encode(text, PROMPT, 3, 0, NULL, 0, tokens, 4, &size) == DLM_OK && size > 0);
  dlm_text_destroy(NULL);
}

static void test_short_buffers_are_filled_and_the_rest_is_told(const dlm_text* text) {
  int32_t all[ROOM], some[3] = {-1, -1, -1};
  size_t count = 0, few = 0, size = 0;
  char whole[ROOM], part[6] = "......";
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, all, ROOM, &count) == DLM_OK &&
        count > 3 && count < ROOM);
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, NULL, 0, &few) == DLM_OK &&
        few == count);
  CLAIM(dlm_text_encode(text, PROMPT, strlen(PROMPT), 1, WHY, some, 2, &few) == DLM_OK &&
        few == count);
  CLAIM(some[0] == all[0] && some[1] == all[1] && some[2] == -1);
  CLAIM(dlm_text_decode(text, all, count, WHY, whole, ROOM, &size) == DLM_OK &&
        size == strlen(PROMPT));
  CLAIM(memcmp(whole, PROMPT, size) == 0);
  CLAIM(dlm_text_decode(text, all, count, WHY, part, 5, &size) == DLM_OK &&
        memcmp(part, "turn .", 6) == 0);
  const dlm_message message = {"user", PROMPT, strlen(PROMPT)};
  CLAIM(dlm_chat_render(text, &message, 1, WHY, whole, ROOM, &size) == DLM_OK &&
        size > strlen(PROMPT) && size < ROOM);
  CLAIM(dlm_text_encode(text, whole, size, DLM_ENCODE_SPECIAL, WHY, some, 3, &few) == DLM_OK &&
        few == count && some[2] == all[2]);
  CLAIM(dlm_text_encode(text, whole, size, 0, WHY, NULL, 0, &few) == DLM_OK && few > count);
  CLAIM(dlm_chat_encode(text, &message, 1, 0, WHY, some, 3, &few) == DLM_OK && few == count &&
        some[2] == all[2]);
  CLAIM(dlm_text_encode(text, "a\0b", 3, 0, WHY, some, 3, &few) == DLM_OK && few == 3);
}

struct told {
  dlm_session* session;
  int32_t stop_at, steps, pieces;
  dlm_status inner;
  char text[ROOM];
};

static int32_t on_step(void* user, const dlm_step* step) {
  struct told* told = user;
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.prompt = "x";
  request.prompt_size = 1;
  told->inner = dlm_session_generate(told->session, &request, NULL);
  told->steps += step->nfe > 0;
  CLAIM(step->text[step->text_size] == '\0' &&
        strlen(told->text) + step->text_size < sizeof told->text);
  strcat(told->text, step->text);
  told->pieces += step->text_size > 0;
  return told->steps == told->stop_at;
}

static dlm_request prompt_of(const char* prompt, struct told* told) {
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.prompt = prompt;
  request.prompt_size = strlen(prompt);
  request.text = DLM_TEXT_RESULT;
  if (told != NULL) {
    request.text = DLM_TEXT_STEPS;
    request.max_new_tokens = 48;
    request.on_step = on_step;
    request.user = told;
  }
  return request;
}

static void test_generating(dlm_bundle* bundle) {
  dlm_session* session = NULL;
  CLAIM(dlm_session_create(bundle, WHY, &session) == DLM_OK);
  struct told told = {session, 0, 0, 0, DLM_OK, ""};
  dlm_request request = prompt_of(PROMPT, &told);
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy); /* several passes, so that the text comes in pieces */
  CLAIM(dlm_bundle_policy(bundle, "llada", NULL, WHY, &policy) == DLM_OK);
  request.policy = &policy;
  const dlm_result* result = NULL;
  char whole[ROOM], stopped[ROOM];
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK);
  CLAIM(result->text_size > 0 && strlen(result->text) == result->text_size &&
        strcmp(result->text, told.text) == 0);
  CLAIM(told.pieces > 1 && told.steps == result->stats->nfe && result->prompt_tokens > 0 &&
        result->is_text_decided == 1);
  CLAIM(told.inner ==
        DLM_INVALID_ARGUMENT); /* a callback must not use the session that called it */
  strcpy(whole, result->text);
  const dlm_message message = {"user", PROMPT, strlen(PROMPT)};
  dlm_request chat = prompt_of("", NULL);
  chat.prompt = NULL, chat.max_new_tokens = 48, chat.messages = &message, chat.message_count = 1;
  CLAIM(dlm_session_generate(session, &chat, &result) == DLM_OK &&
        strcmp(result->text, whole) == 0);
  chat.prompt = PROMPT; /* a prompt and messages must not be passed together */
  chat.prompt_size = strlen(PROMPT);
  CLAIM(dlm_session_generate(session, &chat, &result) == DLM_INVALID_ARGUMENT && result == NULL);
  CLAIM(strstr(dlm_session_last_error(session), "set one") != NULL);
  /* The text ends before the first stop string, and no further pass runs. */
  const int32_t passes = told.steps;
  const char* const stops[] = {"no such text", "kitchen"};
  told.text[0] = '\0';
  request.stop_strings = stops, request.stop_count = 2;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK &&
        result->finish == DLM_FINISH_STOP);
  CLAIM(strstr(whole, "kitchen") == whole + result->text_size &&
        strncmp(whole, result->text, result->text_size) == 0);
  CLAIM(strcmp(told.text, result->text) == 0 && result->stats->nfe <= passes &&
        result->is_text_decided == 1);
  strcpy(stopped, result->text);
  request = prompt_of(PROMPT, NULL);
  request.max_new_tokens = 48, request.stop_strings = stops, request.stop_count = 2,
  request.text = DLM_TEXT_NONE;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK &&
        strcmp(result->text, stopped) == 0);
  const char *const empty[] = {""}, *const wrong[] = {"\xff"}, *const none[] = {NULL};
  request.stop_count = 1, request.stop_strings = empty;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  request.stop_strings = wrong;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  request.stop_strings = none;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  /* The same test with a scheduler. */
  dlm_scheduler* scheduler = NULL;
  dlm_job* job = NULL;
  CLAIM(dlm_scheduler_create(bundle, NULL, WHY, &scheduler) == DLM_OK);
  request.stop_count = 2, request.stop_strings = stops;
  CLAIM(dlm_scheduler_submit(scheduler, &request, WHY, &job) == DLM_OK);
  CLAIM(dlm_scheduler_run(scheduler, 1, NULL, NULL, WHY) == DLM_OK);
  CLAIM(dlm_job_result(job, &result) == DLM_OK && strcmp(result->text, stopped) == 0);
  dlm_job_destroy(job);
  dlm_scheduler_destroy(scheduler);
  told.stop_at = told.steps + 1;
  told.text[0] = '\0';
  request = prompt_of(PROMPT, &told);
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_CANCELLED &&
        result->status == DLM_CANCELLED);
  CLAIM(dlm_session_generate(session, NULL, &result) == DLM_INVALID_ARGUMENT && result == NULL);
  CLAIM(strcmp(dlm_session_last_error(session), "request is NULL") == 0);
  request = prompt_of("\xff", NULL);
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  CLAIM(dlm_session_generate(NULL, &request, &result) == DLM_INVALID_ARGUMENT);
  request = prompt_of(PROMPT, NULL);
  CLAIM(request.max_new_tokens == DLM_DEFAULT_NEW_TOKENS && request.text_start == -1);
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK);
  strcpy(whole, result->text);
  request.max_new_tokens = dlm_bundle_describe(bundle)->denoiser->max_new_tokens;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK);
  CLAIM(strcmp(result->text, whole) == 0); /* the length is the default of the bundle */
  request.text_start = 1 << 20;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  request.text_start = -1;
  request.max_new_tokens = 0;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_OK &&
        result->stats->nfe == 0);           /* with 0 new tokens, no pass runs */
  CLAIM(strcmp(result->text, PROMPT) == 0); /* the text is the whole canvas */
  request.max_new_tokens = -2;
  CLAIM(dlm_session_generate(session, &request, &result) == DLM_INVALID_ARGUMENT);
  CLAIM(strstr(dlm_session_last_error(session), "is negative") != NULL);
  dlm_session_destroy(session);
}

static void* encode_often(void* user) {
  const dlm_text* text = NULL;
  size_t sum = 0, count;
  if (dlm_bundle_text(user, NULL, 0, &text) != DLM_OK) return NULL;
  for (size_t i = 0; i < 200; ++i)
    if (dlm_text_encode(text, PROMPT, i % strlen(PROMPT), 1, NULL, 0, NULL, 0, &count) == DLM_OK)
      sum += count;
  return (void*)sum;
}

static void test_threads_share_a_text(dlm_bundle* bundle) {
  pthread_t threads[4];
  void* sums[4];
  for (size_t i = 0; i < 4; ++i)
    CLAIM(pthread_create(&threads[i], NULL, encode_often, bundle) == 0);
  for (size_t i = 0; i < 4; ++i)
    CLAIM(pthread_join(threads[i], &sums[i]) == 0 && sums[i] != NULL && sums[i] == sums[0]);
}

int main(int argc, char** argv) {
  dlm_bundle* bundle = NULL;
  const dlm_text* text = NULL;
  if (argc != 2 || dlm_bundle_open(argv[1], NULL, WHY, &bundle) != DLM_OK)
    return fprintf(stderr, "%s\n", why), 2;
  test_threads_share_a_text(bundle); /* This test must run first. No thread has read the text file
                                        yet, so the threads race to read it. */
  CLAIM(dlm_bundle_text(bundle, WHY, &text) == DLM_OK);
  test_null_is_refused_by_name(bundle, text);
  test_short_buffers_are_filled_and_the_rest_is_told(text);
  test_generating(bundle);
  dlm_bundle_destroy(bundle);
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
