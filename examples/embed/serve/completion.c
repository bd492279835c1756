/* Reads the JSON of an OpenAI completion request, submits the request to the scheduler, and writes
 * the answer as JSON. */
#define _POSIX_C_SOURCE 200809L
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "serve.h"

struct completion {
  service* service;
  int is_chat, is_stream;
  dlm_policy policy;
  dlm_request request;
  dlm_job* job;
  char id[64];
  int64_t created;
  int is_begun;          /* 1: the first event of the stream, which contains the role, was
                            appended */
  int is_over;           /* all events were appended to the stream */
  pthread_mutex_t mutex; /* protects the fields below, which the scheduler's thread writes */
  pthread_cond_t changed;
  buffer fresh; /* text that has not been sent yet */
};

static completion* refuse(refusal* why, unsigned status, const char* format, const char* detail) {
  why->status = status;
  snprintf(why->message, sizeof why->message, format, detail);
  return NULL;
}

/* Returns the HTTP status that corresponds to a status of the library. */
static unsigned http_status(dlm_status status) {
  switch (status) {
    case DLM_OK:
      return 200;
    case DLM_INVALID_ARGUMENT:
    case DLM_UNSUPPORTED:
      return 400;
    case DLM_BUSY:
      return 429;
    case DLM_OUT_OF_MEMORY:
      return 503;
    default:
      return 500;
  }
}

char* refusal_json(const refusal* why) {
  json_t* const root = json_pack("{s{ssss}}", "error", "message", why->message, "type",
                                 why->status < 500 ? "invalid_request_error" : "server_error");
  char* const text = root == NULL ? NULL : json_dumps(root, JSON_COMPACT);
  json_decref(root);
  return text;
}

/* ---- The request ---- */

static int is_known(const char* name, int is_chat) {
  static const char* const names[] = {"model",       "max_tokens", "seed",
                                      "temperature", "top_p",      "stream"};
  if (strcmp(name, is_chat ? "messages" : "prompt") == 0) return 1;
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
    if (strcmp(name, names[i]) == 0) return 1;
  return 0;
}

/* Reads a number from a member of the object, if the object has this member. Returns 0 if the value
 * is not a number in the range. */
static int read_number(const json_t* root, const char* name, double low, double high,
                       double* number) {
  const json_t* const value = json_object_get(root, name);
  if (value == NULL || json_is_null(value)) return 1;
  if (!json_is_number(value)) return 0;
  *number = json_number_value(value);
  return *number >= low && *number <= high;
}

/* Reads all members of the JSON request except the prompt. After an error, returns 0 and sets
 * *why. */
static int read_options(completion* of, const json_t* root, refusal* why) {
  const char* key;
  json_t* value;
  json_object_foreach((json_t*)root, key, value) {
    if (is_known(key, of->is_chat)) continue;
    refuse(why, 400, "unknown field \"%.60s\": this service takes ", key);
    const size_t used = strlen(why->message);
    snprintf(why->message + used, sizeof why->message - used,
             "%s, model, max_tokens, seed, temperature, top_p and stream",
             of->is_chat ? "messages" : "prompt");
    return 0;
  }
  const json_t *const stream = json_object_get(root, "stream"), *const seed =
                                                                    json_object_get(root, "seed");
  const json_t* const count = json_object_get(root, "max_tokens");
  const int32_t most = of->service->limits.max_tokens;
  if (stream != NULL && !json_is_boolean(stream))
    return refuse(why, 400, "stream is neither true nor false%s", ""), 0;
  of->is_stream = json_is_true(stream);
  const int32_t own = dlm_bundle_describe(of->service->bundle)->denoiser->max_new_tokens;
  of->request.max_new_tokens = own < most ? own : most;
  if (count != NULL) {
    const json_int_t wanted = json_is_integer(count) ? json_integer_value(count) : 0;
    if (wanted < 1) return refuse(why, 400, "max_tokens is no whole number from 1 on%s", ""), 0;
    of->request.max_new_tokens = wanted < most ? (int32_t)wanted : most;
  }
  if (seed != NULL) {
    const json_int_t value = json_is_integer(seed) ? json_integer_value(seed) : -1;
    if (value < 0) return refuse(why, 400, "seed is no whole number from 0 on%s", ""), 0;
    of->policy.seed = (uint64_t)value;
  }
  double temperature = -1, top_p = 1;
  if (!read_number(root, "temperature", 0, 2, &temperature))
    return refuse(why, 400, "temperature is no number in 0..2%s", ""), 0;
  if (!read_number(root, "top_p", 0, 1, &top_p))
    return refuse(why, 400, "top_p is no number in 0..1%s", ""), 0;
  if (temperature >= 0) {
    of->policy.select = temperature > 0 ? "sample" : "argmax";
    of->policy.temperature = temperature;
  }
  if (top_p < 1) of->policy.top_p = top_p; /* without sampling, the library rejects top_p below 1 */
  of->request.deadline_ms = of->service->limits.deadline_ms;
  return 1;
}

/* Reads the messages of a chat into malloc'ed memory. After an error, returns NULL and sets
 * *why. */
static dlm_message* read_chat(const json_t* messages, size_t* count, refusal* why) {
  *count = json_array_size(messages);
  if (*count == 0) return (dlm_message*)refuse(why, 400, "messages is no list of messages%s", "");
  dlm_message* const chat = calloc(*count, sizeof *chat);
  if (chat == NULL) return (dlm_message*)refuse(why, 503, "no memory for the chat%s", "");
  int is_read = 1;
  for (size_t i = 0; is_read && i < *count; ++i) {
    const json_t *const message = json_array_get(messages, i), *const content = json_object_get(
                                                                   message, "content");
    chat[i].role = json_string_value(json_object_get(message, "role"));
    chat[i].content = json_string_value(content);
    chat[i].content_size = json_string_length(content);
    is_read = chat[i].role != NULL && chat[i].content != NULL && json_object_size(message) == 2;
  }
  if (is_read) return chat;
  free(chat);
  return (dlm_message*)refuse(
      why, 400, "a message is no object of a role and a content, which are strings%s", "");
}

/* Sets the prompt or chat of the request. Sets *chat to malloc'ed memory, or to NULL. After an
 * error, returns 0 and sets *why. */
static int read_prompt(completion* of, const json_t* root, dlm_message** chat, refusal* why) {
  const json_t* const prompt = json_object_get(root, of->is_chat ? "messages" : "prompt");
  if (of->is_chat) {
    *chat = read_chat(prompt, &of->request.message_count, why);
    of->request.messages = *chat;
    return *chat != NULL;
  }
  if (!json_is_string(prompt)) return refuse(why, 400, "prompt is no string%s", ""), 0;
  of->request.prompt = json_string_value(prompt);
  of->request.prompt_size = json_string_length(prompt);
  return 1;
}

/* Called after each step, on the scheduler's thread. */
static int32_t on_step(void* user, const dlm_step* step) {
  completion* const of = user;
  pthread_mutex_lock(&of->mutex);
  const int is_kept = buffer_append(&of->fresh, step->text, step->text_size);
  if (of->fresh.size > 0) pthread_cond_signal(&of->changed);
  pthread_mutex_unlock(&of->mutex);
  return !is_kept;
}

/* ---- Start and end of a completion ---- */

completion* completion_start(service* of, uint64_t number, int is_chat, const char* body,
                             size_t size, refusal* why) {
  json_error_t error;
  json_t* const root =
      json_loadb(size > 0 ? body : "", size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
  if (root == NULL) return refuse(why, 400, "the body is no JSON: %.200s", error.text);
  completion* made = calloc(1, sizeof *made);
  if (made == NULL) {
    json_decref(root);
    return refuse(why, 503, "no memory for the request%s", "");
  }
  made->service = of;
  made->is_chat = is_chat;
  made->policy = of->policy;
  made->created = (int64_t)time(NULL);
  snprintf(made->id, sizeof made->id, "%s-%llu", is_chat ? "chatcmpl" : "cmpl",
           (unsigned long long)number);
  dlm_request_init(&made->request, sizeof made->request);
  made->request.policy = &made->policy;
  made->request.text = DLM_TEXT_RESULT;
  pthread_mutex_init(&made->mutex, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&made->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  dlm_message* chat = NULL;
  dlm_status status = DLM_INVALID_ARGUMENT;
  if (!json_is_object(root)) {
    refuse(why, 400, "the body is JSON, and no object%s", "");
  } else if (read_options(made, root, why) && read_prompt(made, root, &chat, why)) {
    if (made->is_stream) {
      made->request.text = DLM_TEXT_STEPS;
      made->request.on_step = on_step, made->request.user = made;
    }
    status = dlm_scheduler_submit(of->scheduler, &made->request, why->message, sizeof why->message,
                                  &made->job);
    why->status = http_status(status);
  }
  free(chat);
  json_decref(root);
  if (status != DLM_OK) {
    completion_destroy(made);
    return NULL;
  }
  return made;
}

void completion_destroy(completion* of) {
  if (of == NULL) return;
  if (of->job != NULL) {
    dlm_job_cancel(of->job);
    dlm_job_wait(of->job, -1); /* wait, because on_step may use the fields below until the request
                                  has ended */
    dlm_job_destroy(of->job);
  }
  buffer_free(&of->fresh);
  pthread_cond_destroy(&of->changed);
  pthread_mutex_destroy(&of->mutex);
  free(of);
}

int completion_is_stream(const completion* of) { return of->is_stream; }

void completion_cancel(completion* of) { dlm_job_cancel(of->job); }

int completion_wait(completion* of, int ms) {
  if (!of->is_stream) return dlm_job_wait(of->job, ms);
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 1000000L * ms;
  until.tv_sec += until.tv_nsec / 1000000000L;
  until.tv_nsec %= 1000000000L;
  pthread_mutex_lock(&of->mutex);
  if (of->fresh.size == 0 && !dlm_job_wait(of->job, 0))
    pthread_cond_timedwait(&of->changed, &of->mutex, &until);
  const int is_told = of->fresh.size > 0;
  pthread_mutex_unlock(&of->mutex);
  return is_told || dlm_job_wait(of->job, 0);
}

/* Returns the result of a finished request. If the request has no answer, returns NULL and sets
 * *why. */
static const dlm_result* read_result(const completion* of, refusal* why) {
  const dlm_result* result = NULL;
  const dlm_status status = dlm_job_result(of->job, &result);
  why->status = http_status(status);
  if (status != DLM_OK)
    refuse(why, why->status, "%s", result->message);
  else if (result->finish == DLM_FINISH_CANCELLED)
    refuse(why, 503, "the service stops, and ended the request%s", "");
  else if (result->finish == DLM_FINISH_DEADLINE && result->stats->nfe == 0)
    refuse(why, 503, "the request waited until its time was over: too many came before it%s", "");
  return why->status == 200 ? result : NULL;
}

static const char* finish_reason(const dlm_result* result) {
  return result->finish == DLM_FINISH_STOP || result->finish == DLM_FINISH_CONSTRAINT ? "stop"
                                                                                      : "length";
}

/* Returns the JSON text of an answer or an event. Takes ownership of `choice` and `usage`. `usage`
 * may be NULL. */
static char* frame(const completion* of, json_t* choice, json_t* usage) {
  const char* const object = !of->is_chat    ? "text_completion"
                             : of->is_stream ? "chat.completion.chunk"
                                             : "chat.completion";
  json_t* const root = json_pack("{sssssIsss[o]so*}", "id", of->id, "object", object, "created",
                                 (json_int_t)of->created, "model", of->service->model, "choices",
                                 choice, "usage", usage);
  char* const text = root == NULL ? NULL : json_dumps(root, JSON_COMPACT);
  json_decref(root);
  return text;
}

static json_t* usage_json(const dlm_result* result) {
  const int given = result->prompt_tokens, made = result->completion_tokens;
  return json_pack("{sisisisi}", "prompt_tokens", given, "completion_tokens", made, "total_tokens",
                   given + made, "passes", (int)result->stats->nfe);
}

char* completion_answer(completion* of, refusal* why) {
  const dlm_result* const result = read_result(of, why);
  if (result == NULL) return NULL;
  json_t* const content = json_stringn(result->text, result->text_size);
  const char* const finish = finish_reason(result);
  json_t* choice;
  if (!of->is_chat)
    choice = json_pack("{sissso}", "index", 0, "finish_reason", finish, "text", content);
  else
    choice = json_pack("{sisss{ssso}}", "index", 0, "finish_reason", finish, "message", "role",
                       "assistant", "content", content);
  char* const text = frame(of, choice, usage_json(result));
  if (text == NULL) refuse(why, 503, "no memory for the answer%s", "");
  return text;
}

static int append_event(buffer* to, char* json) {
  const int is_made = json != NULL && buffer_append(to, "data: ", 6) &&
                      buffer_append(to, json, strlen(json)) && buffer_append(to, "\n\n", 2);
  free(json);
  return is_made;
}

/* Makes a stream event that contains text, or the last event of the stream. */
static char* event_json(const completion* of, const buffer* text, const dlm_result* result) {
  json_t* const content = json_stringn(text->size > 0 ? text->data : "", text->size);
  json_t* const finish = result == NULL ? json_null() : json_string(finish_reason(result));
  json_t* choice;
  if (!of->is_chat)
    choice = json_pack("{sisoso}", "index", 0, "finish_reason", finish, "text", content);
  else if (of->is_begun)
    choice =
        json_pack("{sisos{so}}", "index", 0, "finish_reason", finish, "delta", "content", content);
  else
    choice = json_pack("{sisos{ssso}}", "index", 0, "finish_reason", finish, "delta", "role",
                       "assistant", "content", content);
  return frame(of, choice, result == NULL ? NULL : usage_json(result));
}

int completion_events(completion* of, buffer* to, int* is_last) {
  *is_last = of->is_over;
  if (of->is_over) return 1;
  const int is_done = dlm_job_wait(of->job, 0);
  refusal why = {200, ""};
  const dlm_result* const result = is_done ? read_result(of, &why) : NULL;
  if (is_done && result == NULL) {
    *is_last = of->is_over = 1;
    return append_event(to, refusal_json(&why));
  }
  pthread_mutex_lock(&of->mutex);
  buffer text = of->fresh;
  memset(&of->fresh, 0, sizeof of->fresh);
  pthread_mutex_unlock(&of->mutex);
  if (is_done) *is_last = of->is_over = 1;
  int is_made = append_event(to, event_json(of, &text, result));
  if (is_done) is_made = is_made && buffer_append(to, "data: [DONE]\n\n", 14);
  of->is_begun = 1;
  buffer_free(&text);
  return is_made;
}
