/* A request to generate: made of the JSON that OpenAI's completions take, handed to the scheduler,
 * and told as their JSON. */
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
  dlm_generate_options options;
  dlm_job* job;
  size_t prompt_tokens;
  char id[64];
  int64_t created;
  int is_edited;         /* tokens of the block that is decided may change */
  int is_begun;          /* a stream told who speaks */
  int is_over;           /* and everything else */
  pthread_mutex_t mutex; /* of what follows, which the scheduler's thread fills */
  pthread_cond_t changed;
  dlm_decoder* decoder;
  buffer fresh; /* text that nobody was told */
  size_t read;  /* tokens behind the prompt whose text is in it, or was */
  int is_ended; /* an end token was among them */
};

static completion* refuse(refusal* why, unsigned status, const char* format, const char* detail) {
  why->status = status;
  snprintf(why->message, sizeof why->message, format, detail);
  return NULL;
}

/* The library's status as one of HTTP. */
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

/* A number of the object, or the default; 0 where it is something else, or outside. */
static int read_number(const json_t* root, const char* name, double low, double high,
                       double* number) {
  const json_t* const value = json_object_get(root, name);
  if (value == NULL || json_is_null(value)) return 1;
  if (!json_is_number(value)) return 0;
  *number = json_number_value(value);
  return *number >= low && *number <= high;
}

/* Everything but the prompt. Returns 0 with *why. */
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
  const int32_t own = dlm_bundle_max_new_tokens(of->service->bundle);
  of->options.max_new_tokens = own < most ? own : most;
  if (count != NULL) {
    const json_int_t wanted = json_is_integer(count) ? json_integer_value(count) : 0;
    if (wanted < 1) return refuse(why, 400, "max_tokens is no whole number from 1 on%s", ""), 0;
    if (wanted > most) {
      char limit[32];
      snprintf(limit, sizeof limit, "%d", (int)most);
      return refuse(why, 400, "max_tokens is above %s, the most that this service takes", limit), 0;
    }
    of->options.max_new_tokens = (int32_t)wanted;
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
  if (top_p < 1) of->policy.top_p = top_p; /* the library says so where nothing is drawn */
  of->options.deadline_ms = of->service->limits.deadline_ms;
  of->is_edited = of->policy.remask != NULL && strcmp(of->policy.remask, "edit") == 0;
  return 1;
}

/* The messages of a chat, malloc'ed; NULL with *why. */
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

/* The tokens of the prompt or chat, malloc'ed; NULL with *why. */
static int32_t* read_prompt(const completion* of, const json_t* root, size_t* count, refusal* why) {
  const dlm_text* const text = of->service->text;
  const json_t* const prompt = json_object_get(root, of->is_chat ? "messages" : "prompt");
  size_t messages = 0, capacity = 0;
  dlm_message* const chat = of->is_chat ? read_chat(prompt, &messages, why) : NULL;
  if (of->is_chat && chat == NULL) return NULL;
  if (!of->is_chat && !json_is_string(prompt))
    return (int32_t*)refuse(why, 400, "prompt is no string%s", "");
  const char* const string = json_string_value(prompt);
  const size_t size = json_string_length(prompt), room = sizeof why->message;
  int32_t* tokens = NULL;
  dlm_status status = DLM_OK;
  for (int call = 0; status == DLM_OK && call < 2;
       ++call) { /* once for the count, once for the ids */
    if (call == 1 && (tokens = calloc(*count + 1, sizeof *tokens)) == NULL)
      status = DLM_OUT_OF_MEMORY;
    else if (chat != NULL)
      status =
          dlm_chat_encode(text, chat, messages, 0, why->message, room, tokens, capacity, count);
    else
      status = dlm_text_encode(text, string, size, DLM_ENCODE_PROMPT, why->message, room, tokens,
                               capacity, count);
    capacity = *count;
  }
  why->status = http_status(status);
  if (status != DLM_OK) free(tokens), tokens = NULL;
  free(chat);
  return tokens;
}

/* ---- Text as it is decided ---- */

/* Takes the text that further tokens add. Returns 0 where there is no memory. */
static int push(completion* of, const int32_t* tokens, size_t count, int is_last) {
  const char* text;
  size_t size;
  const dlm_status status = dlm_decoder_push(of->decoder, tokens, count, is_last, &text, &size);
  return status == DLM_OK && buffer_append(&of->fresh, text, size);
}

/* The same for tokens up to `end`, counted from the canvas's start. */
static int take_text(completion* of, const int32_t* canvas, size_t end, int is_last) {
  const dlm_denoiser* const denoiser = &of->service->denoiser;
  int is_kept = 1;
  for (; !of->is_ended && of->prompt_tokens + of->read < end; ++of->read) {
    const int32_t token = canvas[of->prompt_tokens + of->read];
    for (size_t i = 0; i < denoiser->eos_count; ++i)
      of->is_ended |= token == denoiser->eos_token_ids[i];
    if (of->is_ended || token == denoiser->mask_token_id) continue;
    is_kept = push(of, &token, 1, 0) && is_kept;
  }
  return (!is_last || push(of, NULL, 0, 1)) && is_kept;
}

/* On the scheduler's thread: what stands in front of everything undecided is text. */
static int32_t on_step(void* user, const dlm_step* step) {
  completion* const of = user;
  size_t end = of->prompt_tokens;
  while (end < (size_t)step->length && step->canvas[end] != of->service->denoiser.mask_token_id)
    ++end;
  if (of->is_edited && end > (size_t)step->block_start) end = (size_t)step->block_start;
  pthread_mutex_lock(&of->mutex);
  const int is_kept = step->done != 0 || take_text(of, step->canvas, end, 0);
  if (of->fresh.size > 0) pthread_cond_signal(&of->changed);
  pthread_mutex_unlock(&of->mutex);
  return !is_kept;
}

/* ---- A completion's life ---- */

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
  dlm_generate_options_init(&made->options);
  made->options.policy = &made->policy;
  pthread_mutex_init(&made->mutex, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&made->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  int32_t* tokens = NULL;
  dlm_status status = DLM_INVALID_ARGUMENT;
  if (!json_is_object(root))
    refuse(why, 400, "the body is JSON, and no object%s", "");
  else if (read_options(made, root, why))
    tokens = read_prompt(made, root, &made->prompt_tokens, why);
  if (tokens != NULL) {
    status = dlm_decoder_create(of->text, why->message, sizeof why->message, &made->decoder);
    if (made->is_stream) made->options.on_step = on_step, made->options.user = made;
    if (status == DLM_OK)
      status =
          dlm_scheduler_submit(of->scheduler, &made->options, NULL, 0, tokens, made->prompt_tokens,
                               why->message, sizeof why->message, &made->job);
    why->status = http_status(status);
  }
  free(tokens);
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
    dlm_job_wait(of->job, -1); /* on_step is called until then, and reads what goes now */
    dlm_job_destroy(of->job);
  }
  dlm_decoder_destroy(of->decoder);
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

/* What a request that is done came to; 0 where that is no answer. */
static int read_result(const completion* of, dlm_result* result, refusal* why) {
  const dlm_status status = dlm_job_result(of->job, result);
  why->status = http_status(status);
  if (status != DLM_OK)
    refuse(why, why->status, "%s", dlm_job_message(of->job));
  else if (result->finish == DLM_FINISH_CANCELLED)
    refuse(why, 503, "the service stops, and ended the request%s", "");
  else if (result->finish == DLM_FINISH_DEADLINE && result->nfe == 0)
    refuse(why, 503, "the request waited until its time was over: too many came before it%s", "");
  return why->status == 200;
}

static const char* finish_reason(const dlm_result* result) {
  return result->finish == DLM_FINISH_STOP || result->finish == DLM_FINISH_CONSTRAINT ? "stop"
                                                                                      : "length";
}

/* The frame of an answer or an event; steals `choice` and `usage`, which may be NULL. */
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
                   given + made, "passes", (int)result->nfe);
}

char* completion_answer(completion* of, refusal* why) {
  dlm_result result;
  if (!read_result(of, &result, why)) return NULL;
  char* text = NULL;
  if (take_text(of, dlm_job_tokens(of->job, NULL), result.length, 1)) {
    const char* const string = of->fresh.size > 0 ? of->fresh.data : "";
    json_t* const content = json_stringn(string, of->fresh.size);
    const char* const finish = finish_reason(&result);
    json_t* choice;
    if (!of->is_chat)
      choice = json_pack("{sissso}", "index", 0, "finish_reason", finish, "text", content);
    else
      choice = json_pack("{sisss{ssso}}", "index", 0, "finish_reason", finish, "message", "role",
                         "assistant", "content", content);
    text = frame(of, choice, usage_json(&result));
  }
  if (text == NULL) refuse(why, 503, "no memory for the answer%s", "");
  return text;
}

static int append_event(buffer* to, char* json) {
  const int is_made = json != NULL && buffer_append(to, "data: ", 6) &&
                      buffer_append(to, json, strlen(json)) && buffer_append(to, "\n\n", 2);
  free(json);
  return is_made;
}

/* An event of text, or of the end. */
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
  dlm_result result;
  if (is_done && !read_result(of, &result, &why)) {
    *is_last = of->is_over = 1;
    return append_event(to, refusal_json(&why));
  }
  pthread_mutex_lock(&of->mutex);
  buffer text = of->fresh;
  memset(&of->fresh, 0, sizeof of->fresh);
  pthread_mutex_unlock(&of->mutex);
  int is_made = 1;
  if (is_done) { /* nobody else touches it now */
    is_made = take_text(of, dlm_job_tokens(of->job, NULL), result.length, 1) &&
              buffer_append(&text, of->fresh.data, of->fresh.size);
    *is_last = of->is_over = 1;
  }
  is_made = is_made && append_event(to, event_json(of, &text, is_done ? &result : NULL));
  if (is_done) is_made = is_made && buffer_append(to, "data: [DONE]\n\n", 14);
  of->is_begun = 1;
  buffer_free(&text);
  return is_made;
}
