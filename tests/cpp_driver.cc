// Tests dlm_runtime.hpp with a callback denoiser. The tests check that exceptions of callbacks
// reach the caller, that handles can be moved, and that a job may be destroyed before its request
// ends. Prints "N passed, M failed".
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "dlm_runtime.hpp"

using namespace dlm_runtime;

namespace {

int passed = 0, failed = 0;

void check(bool holds, const char* claim) {
  (holds ? passed : failed) += 1;
  if (!holds) std::printf("FAILED: %s\n", claim);
}

// Returns the status that a call throws, or DLM_OK if the call does not throw.
template <class Call>
dlm_status status_of(Call call) {
  try {
    call();
    return DLM_OK;
  } catch (const Error& error) {
    return std::strlen(error.what()) > 0 ? error.status() : DLM_INTERNAL;
  }
}

template <class Call>
bool throws_seven(Call call) {
  try {
    call();
    return false;
  } catch (int value) {
    return value == 7;
  }
}

// Predicts token 2 + p % 5 at position p, with a high probability.
dlm_status run_pass(void*, const dlm_pass* pass) {
  for (int32_t i = 0; i < pass->batch * pass->rows; ++i) {
    const int32_t request = i / pass->rows;
    const int64_t row = pass->score_rows[i];
    const auto token =
        static_cast<int32_t>(2 + pass->position_ids[request * pass->tokens + row] % 5);
    for (int32_t k = 0; k < 2; ++k) {
      pass->top_tokens[2 * i + k] = k == 0 ? token : 7;
      pass->top_probs[2 * i + k] = k == 0 ? 0.9f : 0.1f;
    }
    if (pass->entropy != nullptr) pass->entropy[i] = -0.3f;
  }
  return DLM_OK;
}

Bundle made_bundle() {
  dlm_denoiser denoiser;
  dlm_denoiser_init(&denoiser, sizeof denoiser);
  const int32_t end = 1;
  denoiser.vocab_size = 8;
  denoiser.mask_token_id = 0;
  denoiser.max_canvas_length = 256;
  denoiser.top_k = 2;
  denoiser.layers = 1, denoiser.kv_heads = 1, denoiser.head_size = 1;
  denoiser.eos_token_ids = &end;
  denoiser.eos_count = 1;
  dlm_bundle* bundle = nullptr;
  char message[512];
  if (dlm_bundle_from_callback(&denoiser, run_pass, nullptr, message, sizeof message, &bundle) !=
      DLM_OK)
    std::puts(message);
  return Bundle(bundle);
}

Request of_length(std::vector<int32_t> tokens, int32_t count) {
  Request request;
  request.tokens = std::move(tokens);
  request.max_new_tokens = count;
  return request;
}

void test_sessions() {
  Bundle bundle = made_bundle();
  Session session(bundle);
  const Bundle moved = std::move(bundle);
  const Result made = session.generate(of_length({5, 6}, 8));
  const std::vector<int32_t>& canvas = made.tokens;
  check(canvas.size() == 10 && canvas[1] == 6 && canvas[2] == 4,
        "a canvas is the given tokens and what is predicted");
  check(made.finish == DLM_FINISH_LENGTH && session.result().log_probs.size() == 10,
        "a result is copied");
  check(made.stats.nfe == 8, "passes are counted");
  check(made.top_tokens.empty(), "alternatives are reported only on request");
  Request with_alternatives = of_length({5, 6}, 8);
  with_alternatives.top_log_probs = 2;
  const Result alternatives = session.generate(with_alternatives);
  check(alternatives.top_tokens.size() == 20 && alternatives.top_log_probs.size() == 20 &&
            alternatives.top_tokens[0] == -1 && alternatives.top_tokens[4] == 4,
        "alternatives are copied");

  Request options = of_length({5}, 8);
  int steps = 0;
  options.on_step = [&](const dlm_step&) { return ++steps < 3; };
  const dlm_status ended = status_of([&] { session.generate(options); });
  check(ended == DLM_CANCELLED && steps == 3, "a step that says no ends the request");
  options.on_step = [](const dlm_step&) -> bool { throw 7; };
  check(throws_seven([&] { session.generate(options); }),
        "what a step throws comes out of the call");
  check(session.generate(of_length({5}, 2)).tokens.size() == 3, "and the session goes on");
  session.before_pass([]() -> bool { throw 7; });
  check(throws_seven([&] { session.generate(of_length({5}, 2)); }),
        "what before_pass throws comes out of the call");
  session.before_pass({});
  check(session.generate(of_length({5}, 2)).tokens.size() == 3, "nobody is asked any more");

  const auto by_default = static_cast<std::size_t>(moved.denoiser().max_new_tokens);
  check(by_default > 0 && session.generate(of_length({5}, DLM_DEFAULT_NEW_TOKENS)).tokens.size() ==
                              1 + by_default,
        "no length: the bundle's own");
  check(session.generate(of_length({5}, 0)).tokens.size() == 1, "a length of 0 stays 0");
  check(status_of([&] { session.generate(of_length({99}, 2)); }) == DLM_INVALID_ARGUMENT,
        "a wrong id is refused");
  Request exact = of_length({5}, DLM_DEFAULT_NEW_TOKENS);
  exact.new_tokens = 1 << 30;
  check(status_of([&] { session.generate(exact); }) == DLM_INVALID_ARGUMENT,
        "a long canvas is refused");
  check(status_of([&] {
          Request text;
          text.prompt = "x";
          session.generate(text);
        }) == DLM_UNSUPPORTED,
        "a callback has no text");
  check(status_of([&] { moved.text(); }) == DLM_UNSUPPORTED, "nor has its bundle");
  check(status_of([] { Bundle("/no/such/bundle"); }) == DLM_NOT_FOUND,
        "a bundle that is not there is said so");
  check(status_of([] { Automaton("x", 1); }) == DLM_BAD_BUNDLE,
        "an automaton that is none is refused");
  check(status_of([&] { Automaton(moved, DLM_CONSTRAINT_REGEX, "a+"); }) == DLM_UNSUPPORTED,
        "nothing is compiled for a bundle without text");
  check(status_of([&] { moved.policy(); }) == DLM_NOT_FOUND, "a callback has no presets");

  session.prefix_cache(1 << 20);
  check(session.generate(of_length({5}, 2)).tokens.size() == 3, "a prefix cache changes nothing");
  check(status_of([&] { session.save_prompt_cache({5}, "x"); }) == DLM_UNSUPPORTED,
        "a callback saves no prompt cache");
  check(status_of([&] { moved.load_prompt_cache("x"); }) == DLM_UNSUPPORTED,
        "a callback loads no prompt cache");

  const std::vector<Result> both =
      session.generate_batch({of_length({5}, 3), of_length({6}, 4)}, 2);
  check(both.size() == 2 && both[1].tokens.size() == 5 && both[1].stats.nfe == 4,
        "a batch has a result for each");
  session.start(of_length({5}, 3));
  int steps_made = 0;
  while (session.step().done == 0) ++steps_made;
  check(steps_made == 2, "steps end when all is decided");
  Session other = std::move(session);
  other.start(of_length({5}, 8));
  other.cancel();
  check(other.step().done == 1 && other.result().finish == DLM_FINISH_CANCELLED,
        "a cancelled request ends with what it has");
}

void test_schedulers() {
  const Bundle bundle = made_bundle();
  SchedulerOptions few;
  few.max_waiting = 2;
  Scheduler scheduler(bundle, few);
  std::vector<Job> jobs;
  jobs.push_back(scheduler.submit(of_length({5}, 4)));
  jobs.push_back(scheduler.submit(of_length({6}, 5)));
  check(status_of([&] { scheduler.submit(of_length({7}, 5)); }) == DLM_BUSY,
        "more than may wait are refused");
  check(status_of([&] { jobs[0].result(); }) == DLM_INVALID_ARGUMENT,
        "a job that is not done has no result");
  scheduler.run(true);
  check(
      jobs[0].wait(0) && jobs[0].result().tokens.size() == 5 && jobs[1].result().tokens.size() == 6,
      "jobs come to their canvases");
  check(scheduler.stats().refused == 1 && scheduler.stats().finished == 2, "a scheduler counts");

  check(throws_seven([&] {
          const Job job = scheduler.submit(of_length({5}, 4));
          scheduler.run(true, []() -> bool { throw 7; });
        }),
        "what before_pass throws comes out of run");
  Request options = of_length({5}, 4);
  options.on_step = [](const dlm_step&) -> bool { throw 7; };
  Job thrown = scheduler.submit(options);
  scheduler.run(true);
  check(throws_seven([&] { thrown.result(); }), "what a job's step throws comes out of its result");

  // Jobs are destroyed while passes run. The callback objects must exist until the request has
  // ended.
  std::atomic<int> called{0};
  std::thread passes([&] { scheduler.run(); });
  for (int i = 0; i < 200; ++i) {
    Request told = of_length({5}, 60);
    const std::string text(100, 'x');
    told.on_step = [&called, text](const dlm_step&) { return (called += text.size() == 100) > 0; };
    try {
      Job job = scheduler.submit(told);
      if (i % 3 == 0) job.wait();
      if (i % 3 == 1) job.wait(0.05);
    } catch (const Error& error) {
      if (error.status() != DLM_BUSY) throw;
    }
  }
  scheduler.stop();
  passes.join();
  check(called > 0, "steps were told");
  Scheduler other(bundle, few);
  Job last = other.submit(of_length({5}, 4));
  {
    const Scheduler gone = std::move(other);
  }
  check(last.wait(0) && last.result().finish == DLM_FINISH_CANCELLED,
        "a job outlives its scheduler");
  Job moved = std::move(last);
  check(moved.wait(0), "a job moves");
}

static_assert(!std::is_copy_constructible_v<Bundle> &&
              std::is_nothrow_move_constructible_v<Bundle>);
static_assert(!std::is_copy_constructible_v<Session> &&
              std::is_nothrow_move_constructible_v<Session>);
static_assert(!std::is_copy_constructible_v<Scheduler> && std::is_move_constructible_v<Scheduler>);
static_assert(!std::is_copy_constructible_v<Job> && std::is_nothrow_move_constructible_v<Job>);
static_assert(!std::is_copy_constructible_v<Automaton> && std::is_move_constructible_v<Automaton>);

}  // namespace

int main() {
  test_sessions();
  test_schedulers();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
