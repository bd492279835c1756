/* An HTTP service for completions: serve BUNDLE [--port N] ... README.md explains how to build and
 * use it. One scheduler runs the requests of all clients. After SIGTERM or SIGINT, the service
 * rejects new requests, finishes the running requests, and exits with 0. */
#define _POSIX_C_SOURCE 200809L
#include <microhttpd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "serve.h"

enum { ANSWER_MS = 5000 }; /* time for sending the last answers after --drain-ms */

/* The options of the command line. Each numeric option has a range of valid numbers. */
struct settings {
  double port, threads, max_running, max_waiting, max_tokens, body_bytes, deadline_ms, drain_ms;
  const char *bundle, *address, *preset, *model;
};

static int usage(void) {
  fprintf(
      stderr,
      "usage: serve BUNDLE [options]\n"
      "  --address IP       where it listens, IPv4           [default: 127.0.0.1]\n"
      "  --port N           0: any free one                  [default: 8080; 0..65535]\n"
      "  --preset NAME      of the bundle                    [default: the bundle's]\n"
      "  --model NAME       that answers bear                [default: the bundle's folder]\n"
      "  --threads N        of ONNX Runtime; 0: all cores    [default: 0; 0..4096]\n"
      "  --max-running N    requests that share passes       [default: 16; 1..4096]\n"
      "  --max-waiting N    others; more get 429             [default: 64; 1..100000]\n"
      "  --max-tokens N     new tokens of a request          [default: 256; 1..1000000]\n"
      "  --body-bytes N     of a request; more get 413       [default: 1048576; 1..1073741824]\n"
      "  --deadline-ms N    from a request's coming          [default: 30000; 1..3600000]\n"
      "  --drain-ms N       to finish in when it stops       [default: 10000; 0..3600000]\n");
  return 2;
}

static int wrong(const char* what, const char* why) {
  fprintf(stderr, "serve: %s %s\n", what, why);
  return 0;
}

/* Reads the command line. If it is invalid, prints an error message and returns 0. */
static int read_settings(int argc, char** argv, struct settings* to) {
  const struct {
    const char* name;
    double *value, low, high;
  } numbers[] = {
      {"--port", &to->port, 0, 65535},
      {"--threads", &to->threads, 0, 4096},
      {"--max-running", &to->max_running, 1, 4096},
      {"--max-waiting", &to->max_waiting, 1, 100000},
      {"--max-tokens", &to->max_tokens, 1, 1000000},
      {"--body-bytes", &to->body_bytes, 1, 1073741824},
      {"--deadline-ms", &to->deadline_ms, 1, 3600000},
      {"--drain-ms", &to->drain_ms, 0, 3600000},
  };
  const struct {
    const char *name, **value;
  } texts[] = {{"--address", &to->address}, {"--preset", &to->preset}, {"--model", &to->model}};
  if (argc < 2 || argv[1][0] == '-') return wrong("the bundle's folder", "comes first");
  to->bundle = argv[1];
  for (int i = 2; i < argc; i += 2) {
    int is_known = 0;
    if (i + 1 == argc) return wrong(argv[i], "has no value behind it");
    for (size_t n = 0; n < sizeof texts / sizeof *texts; ++n)
      if (strcmp(argv[i], texts[n].name) == 0) *texts[n].value = argv[i + 1], is_known = 1;
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; ++n) {
      if (strcmp(argv[i], numbers[n].name) != 0) continue;
      char* end;
      *numbers[n].value = (double)strtol(argv[i + 1], &end, 10);
      const double number = *numbers[n].value;
      if (end == argv[i + 1] || *end != '\0' || number < numbers[n].low ||
          number > numbers[n].high) {
        char why[96];
        snprintf(why, sizeof why, "is no whole number in %.0f..%.0f", numbers[n].low,
                 numbers[n].high);
        return wrong(argv[i], why);
      }
      is_known = 1;
    }
    if (!is_known) return wrong(argv[i], "is no option");
  }
  return 1;
}

static int report(dlm_status status, const char* sentence) {
  fprintf(stderr, "serve: %s: %s\n", dlm_status_name(status), sentence);
  return 1;
}

/* Opens the bundle and creates the scheduler. After an error, the caller must destroy the objects
 * that were created. */
static dlm_status open_service(service* to, const struct settings* settings, char* message,
                               size_t capacity) {
  dlm_open_options options;
  dlm_open_options_init(&options, sizeof options);
  options.threads = (int32_t)settings->threads;
  dlm_status status = dlm_bundle_open(settings->bundle, &options, message, capacity, &to->bundle);
  if (status != DLM_OK) return status;
  dlm_policy_init(&to->policy, sizeof to->policy);
  status = dlm_bundle_policy(to->bundle, settings->preset, NULL, message, capacity, &to->policy);
  /* The service needs a tokenizer. dlm_bundle_text fails if the bundle has no tokenizer. */
  const dlm_text* text = NULL;
  if (status == DLM_OK) status = dlm_bundle_text(to->bundle, message, capacity, &text);
  if (status != DLM_OK) return status;
  dlm_scheduler_options scheduling;
  dlm_scheduler_options_init(&scheduling, sizeof scheduling);
  scheduling.max_running = (int32_t)settings->max_running;
  scheduling.max_waiting = (int32_t)settings->max_waiting;
  return dlm_scheduler_create(to->bundle, &scheduling, message, capacity, &to->scheduler);
}

static void* make_passes(void* scheduler) {
  char message[512];
  const dlm_status status = dlm_scheduler_run(scheduler, 0, NULL, NULL, message, sizeof message);
  if (status == DLM_OK) return NULL;
  report(status, message); /* end the service, because no thread runs passes any more; a supervisor
                              can restart it */
  _exit(1);
}

/* Waits until a counter is 0, for at most `ms` milliseconds. Returns 1 if the counter is 0. */
static int wait_until_none(service* of, const unsigned* count, double ms) {
  const struct timespec while_ms = {0, 10000000};
  for (double waited = 0;; waited += 10) {
    pthread_mutex_lock(&of->mutex);
    const unsigned left = *count;
    pthread_mutex_unlock(&of->mutex);
    if (left == 0 || waited >= ms) return left == 0;
    nanosleep(&while_ms, NULL);
  }
}

/* Stops accepting requests, and waits for running requests, but not longer than the limits
 * allow. */
static void stop(service* of, struct MHD_Daemon* daemon) {
  pthread_mutex_lock(&of->mutex);
  of->is_stopping = 1;
  pthread_mutex_unlock(&of->mutex);
  if (!wait_until_none(of, &of->promised, of->limits.drain_ms)) {
    pthread_mutex_lock(&of->mutex);
    of->is_cut = 1;
    pthread_mutex_unlock(&of->mutex);
  }
  const MHD_socket listening = MHD_quiesce_daemon(daemon);
  wait_until_none(of, &of->under_way, ANSWER_MS);
  MHD_stop_daemon(daemon);
  if (listening != MHD_INVALID_SOCKET) close(listening);
}

static void tell_counts(const service* of) {
  fprintf(stderr, "serve: stopped; %llu requests taken", (unsigned long long)of->taken);
  for (unsigned status = 0; status < sizeof of->answered / sizeof *of->answered; ++status)
    if (of->answered[status] > 0)
      fprintf(stderr, ", %llu answered %u", (unsigned long long)of->answered[status], status);
  fprintf(stderr, ", %llu given up by their client\n", (unsigned long long)of->gone);
}

/* Runs the service until a signal arrives. Returns the exit code. */
static int serve(service* of, const struct settings* settings, const sigset_t* signals) {
  pthread_t passes;
  if (pthread_create(&passes, NULL, make_passes, of->scheduler) != 0)
    return report(DLM_OUT_OF_MEMORY, "a thread cannot be started");
  struct MHD_Daemon* const daemon = http_start(of, settings->address, (uint16_t)settings->port);
  int code = 0;
  if (daemon == NULL) {
    fprintf(stderr, "serve: cannot listen on %s, port %d\n", settings->address,
            (int)settings->port);
    code = 1;
  } else {
    printf("listening on http://%s:%u, %s\n", settings->address,
           (unsigned)MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port,
           dlm_bundle_describe(of->bundle)->engine);
    fflush(stdout);
    int number;
    sigwait(signals, &number);
    stop(of, daemon);
    tell_counts(of);
  }
  dlm_scheduler_stop(of->scheduler);
  pthread_join(passes, NULL);
  return code;
}

int main(int argc, char** argv) {
  struct settings settings = {8080,  0,     16,   64,          256,  1048576,
                              30000, 10000, NULL, "127.0.0.1", NULL, NULL};
  if (!read_settings(argc, argv, &settings)) return usage();
  sigset_t signals; /* these signals are blocked in all threads; this thread waits for them */
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, NULL);
  signal(SIGPIPE, SIG_IGN); /* otherwise a client that disconnects would end the program */
  static service of;
  pthread_mutex_init(&of.mutex, NULL);
  const char* const slash = strrchr(settings.bundle, '/');
  of.model = settings.model != NULL              ? settings.model
             : slash != NULL && slash[1] != '\0' ? slash + 1
                                                 : settings.bundle;
  of.limits.body_bytes = (size_t)settings.body_bytes;
  of.limits.max_tokens = (int32_t)settings.max_tokens;
  of.limits.deadline_ms = settings.deadline_ms;
  of.limits.drain_ms = settings.drain_ms;
  of.limits.connections = (unsigned)(settings.max_running + settings.max_waiting) +
                          64; /* extra connections for answers that reject a request */
  char message[1024];
  const dlm_status status = open_service(&of, &settings, message, sizeof message);
  const int code = status == DLM_OK ? serve(&of, &settings, &signals) : report(status, message);
  dlm_scheduler_destroy(of.scheduler);
  dlm_bundle_destroy(of.bundle);
  pthread_mutex_destroy(&of.mutex);
  return code;
}
