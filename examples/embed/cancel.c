/* Generates text until the text is complete, SECONDS have passed, or Ctrl-C is pressed:
 *   cancel BUNDLE NEW_TOKENS SECONDS PROMPT
 * A second thread ends the request after SECONDS or when Ctrl-C is pressed. The program prints the
 * generated text, and the reason why the request ended. README.md explains how to build this
 * program. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dlm_runtime.h"

#define SIG_OVER SIGUSR1 /* the main thread sends this signal when the request has ended */

struct watch {
  dlm_session* session;
  double seconds;
};

/* Waits for one of two signals. Returns the number of the signal, or 0 if no signal arrives within
 * `seconds` seconds. */
static int wait_for(int one, int other, double seconds) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, one);
  sigaddset(&signals, other);
  struct timespec time;
  time.tv_sec = (time_t)seconds;
  time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
  int number;
  do number = sigtimedwait(&signals, NULL, &time);
  while (number < 0 && errno == EINTR);
  return number < 0 ? 0 : number;
}

/* Ends the request when the time limit is reached or Ctrl-C is pressed. The program needs no signal
 * handler, because all threads block the signals, and this thread waits for the signals with
 * wait_for. */
static void* watch(void* user) {
  const struct watch* const watched = user;
  int is_over = wait_for(SIG_OVER, SIGINT, watched->seconds) == SIG_OVER;
  while (!is_over) { /* cancel repeatedly, because cancelling has no effect before the request has
                        begun */
    dlm_session_cancel(watched->session, 0);
    is_over = wait_for(SIG_OVER, SIG_OVER, 0.01) == SIG_OVER;
  }
  return NULL;
}

static const char* finish_name(int32_t finish) {
  static const char* const names[] = {"none",     "stop",      "length",    "steps",
                                      "deadline", "cancelled", "constraint"};
  return finish >= 0 && (size_t)finish < sizeof names / sizeof *names ? names[finish] : "unknown";
}

static int report(dlm_status status, const char* sentence) {
  fprintf(stderr, "cancel: %s: %s\n", dlm_status_name(status), sentence);
  return 1;
}

/* Generates the text, while a second thread may end the request. Returns the exit code. */
static int generate(dlm_session* session, int32_t new_tokens, double seconds, const char* prompt) {
  struct watch watched;
  watched.session = session;
  watched.seconds = seconds;
  pthread_t thread;
  const int refused = pthread_create(&thread, NULL, watch, &watched);
  if (refused != 0) return report(DLM_INTERNAL, strerror(refused));
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.prompt = prompt;
  request.prompt_size = strlen(prompt);
  request.new_tokens = new_tokens;
  request.text = DLM_TEXT_RESULT;
  const dlm_result* result = NULL;
  const dlm_status status = dlm_session_generate(session, &request, &result);
  pthread_kill(thread, SIG_OVER);
  /* The thread uses the session, so the thread must end before dlm_session_destroy is called. */
  pthread_join(thread, NULL);
  if (status != DLM_OK) return report(status, dlm_session_last_error(session));
  int undecided = 0;
  for (size_t i = 0; i < result->length; ++i) undecided += result->undecided[i] != 0;
  fwrite(result->text, 1, result->text_size, stdout);
  printf("\n");
  fprintf(stderr, "%s: %d passes, %d positions undecided\n", finish_name(result->finish),
          (int)result->stats->nfe, undecided);
  return 0;
}

int main(int argc, char** argv) {
  char* ends[2] = {NULL, NULL};
  const long new_tokens = argc == 5 ? strtol(argv[2], &ends[0], 10) : -1;
  const double seconds = argc == 5 ? strtod(argv[3], &ends[1]) : -1;
  if (argc != 5 || *ends[0] != '\0' || *ends[1] != '\0' ||
      !(new_tokens > 0 && new_tokens <= INT32_MAX) || !(seconds >= 0 && seconds <= 1e6)) {
    fprintf(stderr, "usage: cancel BUNDLE NEW_TOKENS SECONDS PROMPT\n");
    return 2;
  }
  sigset_t signals; /* Block the signals before the library starts threads, because a new thread
                       inherits the set of blocked signals. */
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIG_OVER);
  pthread_sigmask(SIG_BLOCK, &signals, NULL);
  char message[1024];
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  dlm_status status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &bundle);
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  const int code = status == DLM_OK ? generate(session, (int32_t)new_tokens, seconds, argv[4])
                                    : report(status, message);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  return code;
}
