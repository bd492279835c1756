/* What the parts of the service share: main.c starts and stops it, http.c speaks HTTP, completion.c
 * makes requests of JSON and JSON of what they come to, buffer.c holds bytes. */
#ifndef SERVE_H
#define SERVE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "dlm_runtime.h"

/* Bytes that grow. */
typedef struct buffer {
  char* data;
  size_t size, capacity;
} buffer;
int buffer_append(buffer* to, const char* data,
                  size_t size); /* 0: there is no memory, and nothing was added */
void buffer_free(buffer* of);

typedef struct limits {
  size_t body_bytes;    /* of a request */
  int32_t max_tokens;   /* new ones of a request */
  double deadline_ms;   /* from a request's coming to its last pass */
  double drain_ms;      /* that requests under way have when the service stops */
  unsigned connections; /* at once */
} limits;

typedef struct service {
  const char* model; /* the name that answers bear */
  limits limits;
  dlm_bundle* bundle;
  dlm_scheduler* scheduler;
  dlm_policy policy; /* of requests that ask for no other */

  pthread_mutex_t mutex;  /* of all that follows */
  int is_stopping;        /* nothing new is taken */
  int is_cut;             /* nor waited for */
  unsigned under_way;     /* requests of HTTP */
  unsigned promised;      /* of these, those that came before is_stopping */
  uint64_t taken;         /* requests so far */
  uint64_t gone;          /* of these, those whose client went away */
  uint64_t answered[600]; /* the others, by status */
} service;

/* Why a request cannot be answered, as HTTP says it. */
typedef struct refusal {
  unsigned status;
  char message[1024];
} refusal;

/* ---- completion.c ---- */

/* A request to generate. One thread uses it, beside the scheduler's. */
typedef struct completion completion;

/* Of the JSON of a body, handed in to the scheduler; `number` tells it from all others. NULL: *why
 * says why not. */
completion* completion_start(service* of, uint64_t number, int is_chat, const char* body,
                             size_t size, refusal* why);
int completion_is_stream(const completion* of);
/* 1: it is done, or a stream has something to tell; 0: neither, for so many milliseconds. */
int completion_wait(completion* of, int ms);
void completion_cancel(completion* of);
/* The answer of one that is done, as JSON (malloc'ed). NULL: *why says why there is none. */
char* completion_answer(completion* of, refusal* why);
/* What a stream has to tell, as events of text/event-stream. 0: there is no memory. *is_last:
 * nothing will follow. */
int completion_events(completion* of, buffer* to, int* is_last);
void completion_destroy(completion* of); /* cancels what is not done */

/* The JSON of a refusal (malloc'ed), or NULL. */
char* refusal_json(const refusal* why);

/* ---- http.c ---- */

struct MHD_Daemon;
struct MHD_Daemon* http_start(service* of, const char* address, uint16_t port);

#endif
