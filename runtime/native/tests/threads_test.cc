// Uses one bundle from many threads, through the C ABI. Some threads run sessions, some submit
// requests to a scheduler, and some cancel requests. Some requests miss their deadline or fail, and
// callbacks stop some requests. Handles are destroyed at any time that the header allows. Each
// request must give a valid result.
//
// threads_test [REQUESTS]: prints "N passed, N failed". Run it with ThreadSanitizer and
// AddressSanitizer.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "dlm_runtime.h"
#include "tests.h"

namespace {

std::atomic<int> passed{0}, failed{0};

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("threads_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

constexpr int32_t kVocab = 40, kMask = 39, kEos = 1, kLength = 24;
constexpr int kThreads = 4;

// The denoiser's passes. About one in 300 passes fails.
dlm_status run(void* user, const dlm_pass* pass) {
  auto& passes = *static_cast<std::atomic<uint32_t>*>(user);
  for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
    const int64_t position =
        pass->position_ids[row / pass->rows * pass->tokens + pass->score_rows[row]];
    const auto token = static_cast<int32_t>(2 + position % 30);
    pass->top_tokens[2 * row] = token, pass->top_tokens[2 * row + 1] = token + 1;
    pass->top_probs[2 * row] = 0.5f, pass->top_probs[2 * row + 1] = 0.25f;
    if (pass->entropy != nullptr) pass->entropy[row] = -1;
    for (int32_t v = 0; pass->logits != nullptr && v < kVocab; ++v)
      pass->logits[row * kVocab + v] = v == token ? 3.0f : 0.0f;
  }
  return ++passes % 307 == 0 ? DLM_ENGINE_FAILED : DLM_OK;
}

int32_t stop_sometimes(void* user, const dlm_step* step) {
  CHECK(step->length == kLength &&
        step->nfe >= 0);  // nfe is 0 if the deadline has passed before the first pass
  return ++*static_cast<int*>(user) == 3;
}

bool may_be(dlm_status status) {
  return status == DLM_OK || status == DLM_ENGINE_FAILED || status == DLM_CANCELLED;
}

// The options of a request, and a counter for its callback.
struct Wish {
  dlm_policy policy;
  dlm_request request;
  const int32_t tokens[2] = {3, 4};
  int steps = 0;

  explicit Wish(std::mt19937& random) {
    dlm_policy_init(&policy, sizeof policy);
    policy.block_length = random() % 2 == 0 ? 0 : 8;
    policy.cache = random() % 3 == 0 ? "none" : "dual";
    if (random() % 4 == 0) policy.select = "sample", policy.temperature = 1;
    dlm_request_init(&request, sizeof request);
    request.tokens = tokens, request.token_count = 2;
    request.policy = &policy, request.max_new_tokens = kLength - 2;
    if (random() % 4 == 0) request.deadline_ms = static_cast<double>(1 + random() % 500) / 1000;
    if (random() % 4 == 0) request.max_steps = static_cast<int32_t>(1 + random() % 6);
    if (random() % 6 == 0) request.on_step = stop_sometimes, request.user = &steps;
  }
};

// Runs a session while another thread cancels its requests.
void generate(dlm_bundle* bundle, std::mt19937& random, int requests) {
  dlm_session* session = nullptr;
  CHECK(dlm_session_create(bundle, nullptr, 0, &session) == DLM_OK);
  std::atomic<bool> is_done{false};
  std::thread other([&] {
    for (size_t number = 0; !is_done; ++number) {
      dlm_session_cancel(session, number % 5 == 0 ? DLM_ALL_REQUESTS : number % 3);
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < requests; ++i) {
    Wish wish(random);
    const dlm_result* result = nullptr;
    const dlm_status status = dlm_session_generate(session, &wish.request, &result);
    CHECK(may_be(status) && result != nullptr && result->length == kLength);
    CHECK(result->status == status && result->tokens[0] == 3 && result->tokens[1] == 4);
  }
  is_done = true;
  other.join();
  dlm_session_destroy(session);
}

// Submits jobs to a scheduler that another thread runs. Does not wait for some of the jobs.
void submit(dlm_scheduler* scheduler, std::mt19937& random, int requests) {
  for (int i = 0; i < requests; ++i) {
    Wish wish(random);
    dlm_job* job = nullptr;
    const dlm_status status = dlm_scheduler_submit(scheduler, &wish.request, nullptr, 0, &job);
    CHECK(status == DLM_OK || status == DLM_BUSY);
    if (job == nullptr) continue;
    const bool is_left = random() % 5 == 0 &&
                         wish.request.on_step == nullptr;  // no callback, because the callback's
                                                           // counter does not outlive this function
    if (random() % 3 == 0) dlm_job_cancel(job);
    dlm_scheduler_stats stats;
    dlm_scheduler_get_stats(scheduler, &stats, sizeof stats);
    CHECK(stats.submitted > 0 && stats.running >= 0);
    if (!is_left) {
      CHECK(dlm_job_wait(job, -1) == 1);
      const dlm_result* result = nullptr;
      const dlm_status ended = dlm_job_result(job, &result);
      CHECK(may_be(ended) && result->status == ended && result->length == kLength);
      CHECK((ended == DLM_OK) == (*result->message == '\0'));
    }
    dlm_job_destroy(job);
  }
}

void serve(dlm_bundle* bundle, uint32_t seed, int requests) {
  dlm_scheduler* scheduler = nullptr;
  dlm_scheduler_options options;
  dlm_scheduler_options_init(&options, sizeof options);
  options.max_running = 3, options.max_waiting = 8;
  CHECK(dlm_scheduler_create(bundle, &options, nullptr, 0, &scheduler) == DLM_OK);
  std::thread runner(
      [&] { CHECK(dlm_scheduler_run(scheduler, 0, nullptr, nullptr, nullptr, 0) == DLM_OK); });
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < kThreads; ++number)
    threads.emplace_back([&, number] {
      std::mt19937 random(seed + number);
      if (number % 2 == 0)
        submit(scheduler, random, requests / kThreads);
      else
        generate(bundle, random, requests / kThreads);
    });
  for (std::thread& thread : threads) thread.join();
  dlm_scheduler_stop(scheduler);
  runner.join();
  dlm_scheduler_destroy(scheduler);
}

long resident_kib() {
  long pages = 0;
  if (std::FILE* const file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return pages * 4;
}

}  // namespace

int threads_test(int argc, char** argv) {
  const int requests = argc > 1 ? std::atoi(argv[1]) : 400;
  std::atomic<uint32_t> passes{0};
  dlm_denoiser denoiser;
  dlm_denoiser_init(&denoiser, sizeof denoiser);
  denoiser.vocab_size = kVocab, denoiser.mask_token_id = kMask, denoiser.max_canvas_length = 64;
  denoiser.layers = 2, denoiser.kv_heads = denoiser.head_size = denoiser.has_cache = 1;
  denoiser.eos_token_ids = &kEos, denoiser.eos_count = 1;
  dlm_bundle* bundle = nullptr;
  CHECK(dlm_bundle_from_callback(&denoiser, run, &passes, nullptr, 0, &bundle) == DLM_OK);
  for (uint32_t tenth = 0; tenth < 10; ++tenth) {
    serve(bundle, tenth * 100, requests / 10);
    if (argc > 1)
      std::fprintf(stderr, "%d requests, %ld KiB resident\n",
                   static_cast<int>(tenth + 1) * (requests / 10), resident_kib());
  }
  dlm_bundle_destroy(bundle);
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed == 0 ? 0 : 1;
}
