/* Runs requests from several threads: threads BUNDLE NEW_TOKENS THREADS PROMPT...
 * First, each thread creates a session and runs one request. All sessions use the same bundle, so
 * memory contains the denoiser's weights only once. Then a scheduler runs the same requests at the
 * same time. The threads, the scheduler and a single session must all give the same results. The
 * program prints the elapsed seconds and the peak memory. README.md explains how to build the
 * program. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dlm_runtime.h"

enum { MOST_THREADS = 1024 };

/* Data that all threads read and no thread changes. */
struct work {
  dlm_bundle* bundle;
  dlm_scheduler* scheduler;
  int32_t new_tokens;
  char** prompts;
};

/* The request of one thread, and the result of this request. */
struct task {
  const struct work* work;
  const char* prompt;
  char* answer; /* malloc'ed */
  dlm_status status;
  char message[512];
};

static dlm_status fail(struct task* task, dlm_status status, const char* sentence) {
  snprintf(task->message, sizeof task->message, "%s", sentence);
  return status;
}

static char* copy(const char* text, size_t size) {
  char* const out = malloc(size + 1);
  if (out != NULL) memcpy(out, text, size), out[size] = '\0';
  return out;
}

static dlm_request request_of(const struct task* task) {
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.prompt = task->prompt;
  request.prompt_size = strlen(task->prompt);
  request.max_new_tokens = task->work->new_tokens;
  request.text = DLM_TEXT_RESULT;
  return request;
}

/* Copies the text of a result. */
static dlm_status keep(struct task* task, const dlm_result* result) {
  if (result->status != DLM_OK) return fail(task, result->status, result->message);
  task->answer = copy(result->text, result->text_size);
  return task->answer != NULL ? DLM_OK : fail(task, DLM_OUT_OF_MEMORY, "no memory for the answer");
}

/* Runs a task in a session of its own. */
static dlm_status answer_alone(struct task* task) {
  dlm_session* session = NULL;
  dlm_status status =
      dlm_session_create(task->work->bundle, task->message, sizeof task->message, &session);
  if (status != DLM_OK) return status;
  const dlm_request request = request_of(task);
  const dlm_result* result = NULL;
  status = dlm_session_generate(session, &request, &result);
  status =
      result != NULL ? keep(task, result) : fail(task, status, dlm_session_last_error(session));
  dlm_session_destroy(session);
  return status;
}

/* Runs a task in the scheduler. */
static dlm_status answer_scheduled(struct task* task) {
  const dlm_request request = request_of(task);
  const dlm_result* result = NULL;
  dlm_job* job = NULL;
  dlm_status status = dlm_scheduler_submit(task->work->scheduler, &request, task->message,
                                           sizeof task->message, &job);
  if (status != DLM_OK) return status; /* a service would answer "try again later" to DLM_BUSY */
  dlm_job_wait(job, -1);
  dlm_job_result(job, &result);
  status = keep(task, result);
  dlm_job_destroy(job);
  return status;
}

static void* run_alone(void* task) {
  ((struct task*)task)->status = answer_alone(task);
  return NULL;
}

static void* run_scheduled(void* task) {
  ((struct task*)task)->status = answer_scheduled(task);
  return NULL;
}

static void* make_passes(void* scheduler) {
  char message[512];
  const dlm_status status = dlm_scheduler_run(scheduler, 0, NULL, NULL, message, sizeof message);
  if (status != DLM_OK) fprintf(stderr, "threads: %s: %s\n", dlm_status_name(status), message);
  return NULL;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Returns the peak memory of the process in MiB. Does not use ru_maxrss of getrusage, because
 * ru_maxrss includes the memory of the program that started this one. */
static double held(void) {
  long kib = 0;
  char line[256];
  FILE* const status = fopen("/proc/self/status", "r");
  while (status != NULL && fgets(line, sizeof line, status) != NULL &&
         sscanf(line, "VmHWM: %ld", &kib) != 1)
    continue;
  if (status != NULL) fclose(status);
  return (double)kib / 1024;
}

/* Starts one thread for each task. Returns the number of tasks with a wrong result. */
static int run_all(const char* name, void* (*run)(void*), struct task* tasks, int count,
                   const struct task* wanted, int kinds) {
  static pthread_t threads[MOST_THREADS];
  const double began = now(), before = held();
  int started = 0, failures = 0;
  for (; started < count; ++started) {
    tasks[started].answer = NULL;
    if (pthread_create(&threads[started], NULL, run, &tasks[started]) != 0) break;
  }
  for (int i = 0; i < started; ++i) pthread_join(threads[i], NULL);
  if (started < count) fprintf(stderr, "threads: only %d threads could be started\n", started);
  for (int i = 0; i < started; ++i) {
    const int is_right =
        tasks[i].status == DLM_OK && strcmp(tasks[i].answer, wanted[i % kinds].answer) == 0;
    if (tasks[i].status != DLM_OK)
      fprintf(stderr, "threads: %s: %s\n", dlm_status_name(tasks[i].status), tasks[i].message);
    failures += !is_right;
    free(tasks[i].answer);
  }
  printf("%s: %d requests in %.3f s, %.1f MiB more, %d not as alone\n", name, started,
         now() - began, held() - before, failures);
  return failures + count - started;
}

/* Runs the requests in one session, then in several threads, then in a scheduler. Returns the exit
 * code. */
static int run_work(struct work* work, int count, int kinds) {
  static struct task wanted[MOST_THREADS], tasks[MOST_THREADS];
  char message[512];
  dlm_status status =
      dlm_scheduler_create(work->bundle, NULL, message, sizeof message, &work->scheduler);
  pthread_t passes;
  if (status == DLM_OK && pthread_create(&passes, NULL, make_passes, work->scheduler) != 0) {
    dlm_scheduler_destroy(work->scheduler);
    snprintf(message, sizeof message, "a thread cannot be started");
    status = DLM_OUT_OF_MEMORY;
  }
  if (status != DLM_OK) {
    fprintf(stderr, "threads: %s: %s\n", dlm_status_name(status), message);
    return 1;
  }
  int failures = 0;
  for (int i = 0; i < kinds; ++i) {
    wanted[i].work = work;
    wanted[i].prompt = work->prompts[i];
    wanted[i].status = answer_alone(&wanted[i]);
    if (wanted[i].status == DLM_OK)
      printf("%s\n", wanted[i].answer);
    else
      fprintf(stderr, "threads: %s: %s\n", dlm_status_name(wanted[i].status), wanted[i].message);
    failures += wanted[i].status != DLM_OK;
  }
  for (int i = 0; i < count; ++i) tasks[i].work = work, tasks[i].prompt = work->prompts[i % kinds];
  if (failures == 0) {
    printf("bundle and one session: %.1f MiB\n", held());
    failures += run_all("sessions", run_alone, tasks, count, wanted, kinds);
    failures += run_all("scheduler", run_scheduled, tasks, count, wanted, kinds);
  }
  for (int i = 0; i < kinds; ++i) free(wanted[i].answer);
  dlm_scheduler_stop(work->scheduler);
  pthread_join(passes, NULL);
  dlm_scheduler_destroy(work->scheduler);
  return failures != 0;
}

int main(int argc, char** argv) {
  const long new_tokens = argc > 4 ? strtol(argv[2], NULL, 10) : 0,
             count = argc > 4 ? strtol(argv[3], NULL, 10) : 0;
  const int kinds = argc - 4;
  if (new_tokens < 1 || new_tokens > INT32_MAX || count < 1 || count > MOST_THREADS ||
      kinds > MOST_THREADS) {
    fprintf(stderr, "usage: threads BUNDLE NEW_TOKENS THREADS PROMPT...  (1..%d threads)\n",
            MOST_THREADS);
    return 2;
  }
  struct work work = {NULL, NULL, (int32_t)new_tokens, argv + 4};
  char message[1024];
  const dlm_status status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &work.bundle);
  if (status != DLM_OK) {
    fprintf(stderr, "threads: %s: %s\n", dlm_status_name(status), message);
    return 1;
  }
  const int code = run_work(&work, (int)count, kinds);
  dlm_bundle_destroy(work.bundle);
  return code;
}
