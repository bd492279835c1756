/* Declarations that the parts of the service share. main.c starts and stops it, http.c speaks HTTP,
 * completion.c turns JSON into requests and results into JSON, and buffer.c holds bytes. */
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
                  size_t size); /* returns 0, and adds nothing, without memory */
void buffer_free(buffer* of);

typedef struct limits {
  size_t body_bytes;    /* of a request */
  int32_t max_tokens;   /* maximum of new tokens of a request */
  double deadline_ms;   /* from a request's arrival to its last pass */
  double drain_ms;      /* time for running requests when the service stops */
  unsigned connections; /* at once */
} limits;

typedef struct service {
  const char* model; /* the name in answers */
  limits limits;
  dlm_bundle* bundle;
  dlm_scheduler* scheduler;
  dlm_policy policy; /* of requests that set no other */

  pthread_mutex_t mutex;  /* guards all fields below */
  int is_stopping;        /* new requests are rejected */
  int is_cut;             /* running requests are cancelled */
  unsigned under_way;     /* HTTP requests */
  unsigned promised;      /* of these, those accepted before is_stopping */
  uint64_t taken;         /* requests so far */
  uint64_t gone;          /* of these, those whose client disconnected */
  uint64_t answered[600]; /* the others, by status */
} service;

/* Why a request is rejected: the HTTP status and a message. */
typedef struct refusal {
  unsigned status;
  char message[1024];
} refusal;

/* ---- completion.c ---- */

/* A request to generate. One thread uses it, and the scheduler's thread. */
typedef struct completion completion;

/* Reads the JSON of a body and submits the request to the scheduler. `number` identifies it. On
 * failure returns NULL and sets *why. */
completion* completion_start(service* of, uint64_t number, int is_chat, const char* body,
                             size_t size, refusal* why);
int completion_is_stream(const completion* of);
/* Waits at most `ms`. Returns 1 if it is done, or if a stream has something to send. */
int completion_wait(completion* of, int ms);
void completion_cancel(completion* of);
/* The answer of a finished one, as JSON (malloc'ed). On failure returns NULL and sets *why. */
char* completion_answer(completion* of, refusal* why);
/* Appends the new events of a stream, as text/event-stream. Sets *is_last with the last one.
 * Returns 0 without memory. */
int completion_events(completion* of, buffer* to, int* is_last);
void completion_destroy(completion* of); /* cancels it if it is not done */

/* The JSON of a refusal (malloc'ed), or NULL without memory. */
char* refusal_json(const refusal* why);

/* ---- http.c ---- */

struct MHD_Daemon;
struct MHD_Daemon* http_start(service* of, const char* address, uint16_t port);

#endif
