/* Measures how fast this machine computes or reads memory. first_pass.py compiles and runs this
 * program:
 *   rates fma THREADS           prints fp32 multiply-adds per second
 *   rates read THREADS BYTES    reads an array of BYTES bytes, and prints bytes per second
 * Each thread computes in registers, or reads its own part of the array. The result is the best of
 * five rounds. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define WIDTH 64 /* bytes of a vector register */
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
/* Each thread computes SUMS independent sums, which hides the latency of multiply-adds. The sums
 * fit in 16 registers. */
enum { ROUNDS = 5, SUMS = 12, TURNS = 1 << 25, LANES = WIDTH / 4 };

typedef float floats __attribute__((vector_size(WIDTH)));
typedef uint64_t words __attribute__((vector_size(WIDTH)));

typedef struct part {
  pthread_barrier_t* barrier;
  const char* first; /* array to read; NULL: compute multiply-adds */
  size_t bytes;
  double best_s, result;
} part;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double multiply_add(void) {
  volatile float given = 0.5f;
  floats sums[SUMS], factor;
  for (int i = 0; i < LANES; ++i) factor[i] = given;
  for (int i = 0; i < SUMS; ++i) sums[i] = factor;
  for (int turn = 0; turn < TURNS; ++turn)
    for (int i = 0; i < SUMS; ++i) sums[i] = sums[i] * factor + factor;
  double total = 0;
  for (int i = 0; i < SUMS; ++i) total += (double)sums[i][0];
  return total;
}

static double read_all(const char* first, size_t bytes) {
  words sums[8] = {{0}};
  for (size_t at = 0; at + sizeof sums <= bytes; at += sizeof sums)
    for (int i = 0; i < 8; ++i) sums[i] ^= ((const words*)(first + at))[i];
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total ^= sums[i][0];
  return (double)total;
}

static void* run(void* argument) {
  part* const mine = argument;
  for (int round = 0; round < ROUNDS; ++round) {
    pthread_barrier_wait(mine->barrier);
    const double began = now();
    mine->result += mine->first ? read_all(mine->first, mine->bytes) : multiply_add();
    pthread_barrier_wait(mine->barrier); /* a round ends when all threads have finished */
    const double seconds = now() - began;
    if (round == 0 || seconds < mine->best_s) mine->best_s = seconds;
  }
  return NULL;
}

int main(int argc, char** argv) {
  const long threads = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
  const int is_read = argc > 3 && strcmp(argv[1], "read") == 0;
  if (threads < 1 || (!is_read && (argc != 3 || strcmp(argv[1], "fma") != 0))) {
    fprintf(stderr, "usage: rates fma THREADS | rates read THREADS BYTES\n");
    return 2;
  }
  const size_t each =
      is_read ? (size_t)strtoull(argv[3], NULL, 10) / (size_t)threads / 512 * 512 : 0;
  char* const array = is_read ? aligned_alloc(64, each * (size_t)threads + 64) : NULL;
  part* const parts = calloc((size_t)threads, sizeof *parts);
  pthread_t* const started = calloc((size_t)threads, sizeof *started);
  pthread_barrier_t barrier;
  if (parts == NULL || started == NULL || (is_read && array == NULL) ||
      pthread_barrier_init(&barrier, NULL, (unsigned)threads) != 0)
    return 1;
  if (is_read) memset(array, 1, each * (size_t)threads);
  for (long i = 0; i < threads; ++i) {
    parts[i].barrier = &barrier;
    parts[i].first = is_read ? array + (size_t)i * each : NULL;
    parts[i].bytes = each;
    if (pthread_create(&started[i], NULL, run, &parts[i]) != 0) return 1;
  }
  for (long i = 0; i < threads; ++i) pthread_join(started[i], NULL);
  volatile double kept = parts[0].result; /* the compiler must not remove the loops */
  (void)kept;
  const double amount = is_read ? (double)each : (double)TURNS * SUMS * LANES;
  printf("%.0f\n", amount * (double)threads / parts[0].best_s);
  return 0;
}
