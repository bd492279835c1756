/* The HTTP part of the service. It uses libmicrohttpd with one thread per connection. */
#define _GNU_SOURCE /* POLLRDHUP */
#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve.h"

enum {
  POLL_MS = 100,    /* time between checks whether the client is still connected */
  MOST_DROPPED = 16 /* the connection is closed if a body is larger than this many times the
                       limit */
};

/* An HTTP request and its answer. */
typedef struct exchange {
  service* service;
  uint64_t number;
  int is_refused_early; /* the service is stopping */
  unsigned status;      /* HTTP status of the answer; 0: there is no answer yet */
  int socket;
  uint64_t received; /* number of bytes of the body so far, including discarded bytes */
  buffer body;
  completion* completion;
  buffer events; /* events of a stream that have not been sent yet */
  size_t sent;
  int is_last;
} exchange;

/* Returns 1 if the client has closed the connection before the answer was sent. */
static int is_gone(const exchange* of) {
  struct pollfd one = {of->socket, POLLRDHUP, 0};
  return poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

/* Waits until there is an answer or a stream event to send. Returns 0 if the client has
 * disconnected. */
static int wait_for(exchange* of) {
  while (!completion_wait(of->completion, POLL_MS)) {
    if (is_gone(of)) return 0;
    pthread_mutex_lock(&of->service->mutex);
    const int is_cut = of->service->is_cut;
    pthread_mutex_unlock(&of->service->mutex);
    if (is_cut) completion_cancel(of->completion);
  }
  return 1;
}

/* ---- Answers ---- */

static enum MHD_Result send_response(struct MHD_Connection* connection, exchange* of,
                                     unsigned status, const char* type,
                                     struct MHD_Response* response) {
  if (response == NULL) return MHD_NO;
  pthread_mutex_lock(&of->service->mutex);
  const int is_stopping = of->service->is_stopping;
  pthread_mutex_unlock(&of->service->mutex);
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
  if (status == 429 || status == 503)
    MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
  if (status == 405) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, POST");
  if (is_stopping) MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  const enum MHD_Result queued = MHD_queue_response(connection, status, response);
  MHD_destroy_response(response);
  if (queued == MHD_YES) of->status = status;
  return queued;
}

/* Sends `text` as the answer, and frees `text`, which is malloc'ed. If `text` is NULL, closes the
 * connection. */
static enum MHD_Result send_text(struct MHD_Connection* connection, exchange* of, unsigned status,
                                 const char* type, char* text) {
  if (text == NULL) return MHD_NO;
  struct MHD_Response* const response =
      MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE);
  if (response == NULL) free(text);
  return send_response(connection, of, status, type, response);
}

static enum MHD_Result send_refusal(struct MHD_Connection* connection, exchange* of,
                                    const refusal* why) {
  return send_text(connection, of, why->status, "application/json", refusal_json(why));
}

static enum MHD_Result refuse(struct MHD_Connection* connection, exchange* of, unsigned status,
                              const char* sentence) {
  refusal why;
  why.status = status;
  snprintf(why.message, sizeof why.message, "%s", sentence);
  return send_refusal(connection, of, &why);
}

/* Waits for the next bytes of a stream's events, and copies them to the answer. */
static ssize_t read_events(void* user, uint64_t position, char* to, size_t room) {
  exchange* const of = user;
  (void)position;
  if (of->sent == of->events.size) {
    if (of->is_last) return MHD_CONTENT_READER_END_OF_STREAM;
    of->sent = of->events.size = 0;
    if (!wait_for(of) || !completion_events(of->completion, &of->events, &of->is_last))
      return MHD_CONTENT_READER_END_WITH_ERROR;
  }
  const size_t left = of->events.size - of->sent, size = left < room ? left : room;
  memcpy(to, of->events.data + of->sent, size);
  of->sent += size;
  return (ssize_t)size;
}

static enum MHD_Result complete(struct MHD_Connection* connection, exchange* of, int is_chat) {
  refusal why = {200, ""};
  of->completion =
      completion_start(of->service, of->number, is_chat, of->body.data, of->body.size, &why);
  buffer_free(&of->body);
  if (of->completion == NULL) return send_refusal(connection, of, &why);
  if (completion_is_stream(of->completion)) {
    struct MHD_Response* const response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, read_events, of, NULL);
    return send_response(connection, of, 200, "text/event-stream", response);
  }
  if (!wait_for(of)) return MHD_NO;
  char* const text = completion_answer(of->completion, &why);
  return text == NULL ? send_refusal(connection, of, &why)
                      : send_text(connection, of, 200, "application/json", text);
}

/* Writes the statistics of the service in the format of Prometheus. */
static enum MHD_Result tell_metrics(struct MHD_Connection* connection, exchange* of) {
  service* const service = of->service;
  dlm_scheduler_stats stats;
  dlm_scheduler_get_stats(service->scheduler, &stats, sizeof stats);
  buffer text = {NULL, 0, 0};
  char line[256];
  int is_made = 1;
  pthread_mutex_lock(&service->mutex);
  for (unsigned status = 0; status < sizeof service->answered / sizeof *service->answered;
       ++status) {
    if (service->answered[status] == 0) continue;
    const int size = snprintf(line, sizeof line, "dlm_answers_total{status=\"%u\"} %llu\n", status,
                              (unsigned long long)service->answered[status]);
    is_made = is_made && buffer_append(&text, line, (size_t)size);
  }
  const unsigned long long gone = service->gone;
  pthread_mutex_unlock(&service->mutex);
  const int size = snprintf(
      line, sizeof line,
      "dlm_clients_gone_total %llu\ndlm_submitted_total %lld\ndlm_waiting %d\ndlm_running %d\n"
      "dlm_passes_total %lld\ndlm_shares_total %lld\ndlm_busy_seconds_total %.6f\ndlm_cache_bytes "
      "%llu\n",
      gone, (long long)stats.submitted, (int)stats.waiting, (int)stats.running,
      (long long)stats.passes, (long long)stats.shares, stats.busy_s,
      (unsigned long long)stats.cache_bytes);
  is_made = is_made && buffer_append(&text, line, (size_t)size + 1); /* including the NUL at the
                                                                        end */
  if (!is_made) buffer_free(&text);
  return send_text(connection, of, 200, "text/plain; version=0.0.4", text.data);
}

/* ---- Requests ---- */

static enum MHD_Result answer(struct MHD_Connection* connection, exchange* of, const char* url,
                              const char* method) {
  const int is_get = strcmp(method, MHD_HTTP_METHOD_GET) == 0,
            is_post = strcmp(method, MHD_HTTP_METHOD_POST) == 0;
  const int is_completion = strcmp(url, "/v1/completions") == 0,
            is_chat = strcmp(url, "/v1/chat/completions") == 0;
  /* Browsers send Origin with each POST request of a web page, also after DNS rebinding. */
  if (is_post && MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Origin") != NULL)
    return refuse(connection, of, 403, "web pages may not use this service");
  if (of->is_refused_early) return refuse(connection, of, 503, "the service stops");
  if (of->received > of->body.size)
    return refuse(connection, of, 413, "the body is larger than this service takes");
  if (is_completion || is_chat)
    return is_post ? complete(connection, of, is_chat)
                   : refuse(connection, of, 405, "completions are asked for by POST");
  if (strcmp(url, "/health") == 0 || strcmp(url, "/metrics") == 0) {
    if (!is_get) return refuse(connection, of, 405, "this is read by GET");
    if (url[1] == 'm') return tell_metrics(connection, of);
    return send_text(connection, of, 200, "application/json", strdup("{\"status\":\"ok\"}"));
  }
  return refuse(connection, of, 404,
                "there are /v1/completions, /v1/chat/completions, /health and /metrics");
}

static exchange* begin(service* of, struct MHD_Connection* connection) {
  exchange* const made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->service = of;
  made->socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
  pthread_mutex_lock(&of->mutex);
  made->number = ++of->taken;
  made->is_refused_early = of->is_stopping;
  ++of->under_way;
  of->promised += (unsigned)!of->is_stopping;
  pthread_mutex_unlock(&of->mutex);
  return made;
}

static enum MHD_Result handle(void* user, struct MHD_Connection* connection, const char* url,
                              const char* method, const char* version, const char* upload,
                              size_t* upload_size, void** state) {
  (void)version;
  exchange* of = *state;
  if (of == NULL) return (*state = begin(user, connection)) == NULL ? MHD_NO : MHD_YES;
  if (*upload_size == 0) return answer(connection, of, url, method);
  const size_t most = of->service->limits.body_bytes;
  of->received += *upload_size;
  if (of->received <= most && !of->is_refused_early &&
      !buffer_append(&of->body, upload, *upload_size))
    return MHD_NO;
  *upload_size = 0;
  /* If the body is too large, read and discard the rest, because many clients read the answer only
   * after they have sent the whole body. If the body is more than MOST_DROPPED times too large,
   * close the connection. */
  return of->received / MOST_DROPPED > most ? MHD_NO : MHD_YES;
}

/* Called after the answer was sent or could not be sent. */
static void end(void* user, struct MHD_Connection* connection, void** state,
                enum MHD_RequestTerminationCode why) {
  exchange* const of = *state;
  (void)user;
  (void)connection;
  if (of == NULL) return;
  completion_destroy(of->completion);
  buffer_free(&of->body);
  buffer_free(&of->events);
  pthread_mutex_lock(&of->service->mutex);
  --of->service->under_way;
  of->service->promised -= (unsigned)!of->is_refused_early;
  if (of->status != 0 && why == MHD_REQUEST_TERMINATED_COMPLETED_OK)
    ++of->service->answered[of->status];
  else
    ++of->service->gone;
  pthread_mutex_unlock(&of->service->mutex);
  free(of);
  *state = NULL;
}

struct MHD_Daemon* http_start(service* of, const char* address, uint16_t port) {
  struct sockaddr_in place;
  memset(&place, 0, sizeof place);
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  if (inet_pton(AF_INET, address, &place.sin_addr) != 1) return NULL;
  /* The timeout is longer than the longest request. With a shorter timeout, libmicrohttpd would
   * close a connection as idle while its request runs. */
  const unsigned idle_s = (unsigned)(of->limits.deadline_ms / 1000) + 30;
  const unsigned flags =
      MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_ITC;
  return MHD_start_daemon(flags, port, NULL, NULL, handle, of, MHD_OPTION_NOTIFY_COMPLETED, end, of,
                          MHD_OPTION_SOCK_ADDR, &place, MHD_OPTION_CONNECTION_LIMIT,
                          of->limits.connections, MHD_OPTION_CONNECTION_TIMEOUT, idle_s,
                          MHD_OPTION_END);
}
