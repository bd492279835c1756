/* Declarations that all parts of the service share. main.c starts and stops the service, http.c
 * implements HTTP, completion.c converts JSON to requests and results to JSON, and buffer.c stores
 * bytes. */
#ifndef SERVE_H
#define SERVE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "dlm_runtime.h"

/* A growing array of bytes. */
typedef struct buffer {
  char* data;
  size_t size, capacity;
} buffer;
int buffer_append(buffer* to, const char* data,
                  size_t size); /* appends bytes; returns 0 if there is no memory */
void buffer_free(buffer* of);

typedef struct limits {
  size_t body_bytes;    /* largest size of a request's body */
  int32_t max_tokens;   /* largest number of new tokens of a request */
  double deadline_ms;   /* time from the arrival of a request to its last pass */
  double drain_ms;      /* time for running requests to finish when the service stops */
  unsigned connections; /* largest number of connections at the same time */
} limits;

typedef struct service {
  const char* model; /* the name of the model in answers */
  limits limits;
  dlm_bundle* bundle;
  dlm_scheduler* scheduler;
  dlm_policy policy; /* the policy of requests that do not select one */

  pthread_mutex_t mutex;  /* protects all fields below */
  int is_stopping;        /* 1: new requests are rejected */
  int is_cut;             /* 1: running requests are cancelled */
  unsigned under_way;     /* number of HTTP requests that are not finished */
  unsigned promised;      /* number of unfinished HTTP requests that were accepted before
                             is_stopping became 1 */
  uint64_t taken;         /* number of HTTP requests so far */
  uint64_t gone;          /* number of HTTP requests whose client disconnected */
  uint64_t answered[600]; /* number of answered HTTP requests for each HTTP status */
} service;

/* Why a request is rejected: an HTTP status and a message. */
typedef struct refusal {
  unsigned status;
  char message[1024];
} refusal;

/* ---- completion.c ---- */

/* A completion request. Two threads use it: the thread of its connection, and the scheduler's
 * thread. */
typedef struct completion completion;

/* Reads the JSON in the body of an HTTP request, and submits a request to the scheduler. `number`
 * identifies the request. After an error, returns NULL and sets *why. */
completion* completion_start(service* of, uint64_t number, int is_chat, const char* body,
                             size_t size, refusal* why);
int completion_is_stream(const completion* of);
/* Waits at most `ms` milliseconds. Returns 1 if the completion is finished, or if there are events
 * to send. */
int completion_wait(completion* of, int ms);
void completion_cancel(completion* of);
/* Returns the answer of a finished completion as malloc'ed JSON. After an error, returns NULL and
 * sets *why. */
char* completion_answer(completion* of, refusal* why);
/* Appends the new events of a stream, as text/event-stream. Sets *is_last if these include the last
 * event of the stream. Returns 0 if there is no memory. */
int completion_events(completion* of, buffer* to, int* is_last);
void completion_destroy(completion* of); /* cancels the request if it is not finished */

/* Returns the answer to a rejected request as malloc'ed JSON, or NULL if there is no memory. */
char* refusal_json(const refusal* why);

/* ---- http.c ---- */

struct MHD_Daemon;
struct MHD_Daemon* http_start(service* of, const char* address, uint16_t port);

#endif
