// Tests that a request gives the same result when it runs alone, when it shares passes with other
// requests, and when requests take turns. The predictions of a fake denoiser depend on every row
// that a pass can see, and on nothing else. Several threads submit random requests, some of which
// are cancelled or fail.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed".
#include "decode/runner.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cache/arena.h"
#include "compile/constraint.h"
#include "constraints/constrained.h"
#include "decode/lockstep_passes.h"
#include "decode/proposer.h"
#include "decode/save_prompt.h"
#include "summing_engine.h"
#include "tests.h"

namespace {

int passed = 0, failed = 0;
int64_t all_hits = 0, window_hits = 0;

void note(bool holds, int line, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("runner_test.cc:%d: failed: %s\n", line, what.c_str());
}
#define CHECK(condition) note((condition), __LINE__, #condition)

// The function in which a proposer throws an exception, or `none`.
enum class Fault { none, needs, propose, end, end_foreign, end_memory, step };

struct NotAnException {};

// Behaves like the policy's own proposer, but throws in one of its functions.
class Faulty final : public dlm::Proposer {
 public:
  Faulty(const dlm::Denoiser& of, const dlm::Policy& policy, Fault fault)
      : own_(dlm::make_proposer(of, policy)), fault_(fault) {}

  dlm::Needs needs(const dlm::Turn& turn) const override {
    throw_at(Fault::needs);
    return own_->needs(turn);
  }
  void propose(const dlm::Turn& turn, const dlm::Predictions& predictions,
               dlm::Proposals& proposals) override {
    throw_at(Fault::propose);
    own_->propose(turn, predictions, proposals);
  }
  void scaffold(const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided,
                dlm::Range range, std::vector<dlm::Certain>& certain) override {
    own_->scaffold(canvas, undecided, range, certain);
  }
  void complete(const std::vector<int32_t>&, const std::vector<uint8_t>&,
                std::vector<int32_t>&) override {
    if (fault_ == Fault::end_foreign) throw NotAnException{};
    if (fault_ == Fault::end_memory) throw std::bad_alloc();
    throw_at(Fault::end);
  }
  void note(int32_t position, int32_t token) override { own_->note(position, token); }

 private:
  void throw_at(Fault where) const {
    if (fault_ == where) dlm::fail(DLM_BAD_BUNDLE, "made to fail");
  }

  const std::unique_ptr<dlm::Proposer> own_;
  const Fault fault_;
};

// The options of a job. Unlike JobOptions, they can be copied.
struct Limits {
  int32_t max_steps = 0;
  std::optional<dlm::Clock::time_point> deadline;
  dlm_step_fn on_step = nullptr;
  void* user = nullptr;

  dlm::JobOptions make() const {
    dlm::JobOptions options;
    options.max_steps = max_steps;
    options.deadline = deadline;
    options.on_step = on_step;
    options.user = user;
    return options;
  }
};

// A scheduler with the pass maker that suits the engine. If `window_rows` is -1, layers with a
// window have room for as many rows as the other layers.
class Scheduler {
 public:
  Scheduler(const dlm::Denoiser& of, dlm::Engine& engine, const dlm::Runner::Options& options,
            int64_t rows, int64_t most_idle = 0, int64_t window_rows = -1) {
    const dlm::RowCounts room{rows, window_rows < 0 ? rows : window_rows};
    passes_ = dlm::make_shared_passes(of, engine, room, most_idle, files_);
    if (passes_ == nullptr)
      passes_ = std::make_unique<dlm::LockstepPasses>(of, engine, room,
                                                      static_cast<size_t>(options.most_running));
    runner_.emplace(of, *passes_, options);
  }
  std::shared_ptr<dlm::Job> submit(dlm::Request request, const Limits& limits) {
    return runner_->submit(std::move(request), limits.make());
  }
  void run(bool until_idle, const std::function<bool()>& before_pass) {
    runner_->run(until_idle ? dlm::Runner::Until::idle : dlm::Runner::Until::stopped, before_pass);
  }
  void stop() { runner_->stop(); }
  dlm_scheduler_stats told() const { return runner_->stats(); }

  dlm::PromptCaches& files() { return files_; }

 private:
  dlm::PromptCaches files_;
  std::unique_ptr<dlm::PassMaker> passes_;
  std::optional<dlm::Runner> runner_;
};

int32_t finish_of(const dlm::Job& job) { return job.result().finish; }

std::vector<int32_t> canvas_of(const dlm::Job& job) {
  return {job.result().tokens, job.result().tokens + job.result().length};
}

// Returns constraints over the tokens of the fake denoisers.
const std::vector<std::shared_ptr<const dlm::Automaton>>& constraints() {
  static const auto all = [] {
    const dlm::compile::Vocabulary vocabulary(
        {"", "", "a", "b", "ab", "c", "ba", "aa", "cb", "d", "dd", "x", "abc"}, {}, kVocabulary,
        {kEnd}, nullptr);
    std::vector<std::shared_ptr<const dlm::Automaton>> made;
    for (const char* const content :
         {"[ab]+c?", "(?:ab|c)*d", "a{3,9}(?:b|c)", "[abcdx]*", "ab(?:c|d){2,4}", "x|dd|aab"}) {
      dlm::compile::Constraint wanted;
      wanted.kind = dlm::compile::Constraint::regex;
      wanted.content = content;
      made.push_back(std::make_shared<const dlm::Automaton>(
          dlm::compile::compile_constraint(wanted, vocabulary).automaton));
    }
    return made;
  }();
  return all;
}

// Describes a request, so that the same request can be created several times.
struct Wish {
  dlm::Policy policy;
  std::vector<int32_t> canvas;
  Limits limits;
  std::shared_ptr<const dlm::Automaton> constraint{};  // may be NULL

  dlm::Request make(const dlm::Denoiser& of, const dlm::Engine& engine,
                    Fault fault = Fault::none) const {
    std::vector<uint8_t> undecided;
    for (const int32_t token : canvas) undecided.push_back(token == of.mask_token_id);
    if (fault == Fault::none && constraint == nullptr)
      return dlm::Request(of, engine, policy, canvas, undecided, 0);
    if (fault == Fault::none)
      return dlm::Request(
          of, engine, policy, canvas, undecided, 0,
          std::make_unique<dlm::Constrained>(of, policy, constraint, 0, canvas, undecided));
    // The policy must not start from random tokens or decide positions of several blocks, because
    // the request has its own proposer.
    dlm::Policy other = policy;
    other.next_block = 1;
    if (other.remask == dlm::Remask::noise) other.remask = dlm::Remask::none;
    return dlm::Request(of, engine, other, canvas, undecided, 0,
                        std::make_unique<Faulty>(of, other, fault));
  }

  // Returns true if the generated tokens are a text of the constraint.
  bool is_legal(const dlm::Job& job, int32_t mask) const {
    if (constraint == nullptr) return true;
    const std::vector<int32_t> found = canvas_of(job);
    int32_t state = 0;
    for (size_t i = 0; i < found.size() && state >= 0; ++i)
      if (canvas[i] == mask) state = constraint->next(state, found[i]);
    return state >= 0 && constraint->distances[static_cast<size_t>(state)] == 0;
  }
};

template <class Of>
auto any_of(std::mt19937& random, const std::vector<Of>& values) {
  return values[random() % values.size()];
}

// Sets the fields of a policy that starts blocks from random tokens.
void choose_noise(std::mt19937& random, dlm_policy& policy) {
  policy.remask = "noise", policy.reserve = "none", policy.store = "pass";
  policy.sub_block_length = 0, policy.finish_threshold = 1;
  policy.commit = any_of<const char*>(random, {"entropy_bound", "threshold", "factor"});
  policy.entropy_bound = any_of<double>(random, {0, 0.5, 4});
  policy.steps_per_block = any_of<int32_t>(random, {0, 1, 6});
  policy.stable_passes = any_of<int32_t>(random, {0, 1, 2});
  if (std::string(policy.commit) == "entropy_bound")
    policy.stable_entropy = any_of<double>(random, {0, 1, 3});
  if (random() % 2 == 0) {
    policy.select = "sample", policy.temperature = any_of<double>(random, {0.2, 1.5});
    policy.temperature_drop = any_of<double>(random, {0, 0.1, 0.2});
    policy.score_of = any_of<const char*>(random, {"prediction", "draw"});
  }
}

Wish make_wish(std::mt19937& random, int32_t visible_block, int32_t shift, bool is_noised = false,
               bool blocks_after_prompt = false) {
  dlm_policy policy = dlm::default_policy();
  policy.commit = any_of<const char*>(
      random, {"static", "threshold", "dynamic", "factor", "sequential", "longest_prefix"});
  policy.score = any_of<const char*>(random, {"confidence", "margin", "random"});
  policy.threshold = any_of<double>(random, {0.3, 0.6, 0.9});
  policy.schedule = any_of<const char*>(random, {"masked", "block", "floor"});
  policy.reserve = any_of<const char*>(random, {"none", "end"});
  policy.finish_threshold = any_of<double>(random, {1, 1, 0.2});
  policy.seed = random();
  bool is_verified = false;
  if (visible_block == 1) {  // the denoiser has draft passes
    policy.cache = "block";
    policy.block_length = any_of<int32_t>(random, {0, 1, 5});
    is_verified = shift == 1 || (!is_noised && random() % 2 == 0);
    if (is_verified) policy.commit = "verify", policy.score = "confidence", policy.reserve = "none";
  } else if (visible_block > 0) {
    policy.cache = any_of<const char*>(random, {"none", "block", "block", "block-dual"});
    policy.block_length = 0;
    policy.sub_block_length = any_of<int32_t>(random, {0, visible_block / 2});
    if (shift == 0 && std::string(policy.cache) == "block" && random() % 3 == 0)
      policy.remask = "edit";
    if (shift == 0 && std::string(policy.cache) == "block")
      policy.store = any_of<const char*>(random, {"pass", "open", "reuse"});
    if (blocks_after_prompt && random() % 4 != 0) {
      policy.cache = any_of<const char*>(random, {"none", "block", "block"});
      policy.commit = "threshold", policy.remask = "none", policy.store = "pass";
      policy.compare = any_of<const char*>(random, {">", ">="});
      policy.next_block = any_of<double>(random, {0, 0.1, 0.3, 0.8});
      policy.force_next = any_of<double>(random, {0.3, 0.9, 1});
      policy.sub_block_length = 0;
    }
  } else {
    policy.cache = any_of<const char*>(random, {"none", "prefix", "dual", "dual"});
    policy.block_length = any_of<int32_t>(random, {0, 4, 7});
    const bool is_prefix = std::string(policy.cache) == "prefix";
    if (is_prefix && shift == 0 && random() % 2 == 0) {
      policy.commit = "threshold";
      policy.next_block = any_of<double>(random, {0, 0.3, 0.8});
      policy.cache_delay = any_of<int32_t>(random, {0, 1, 3});
      policy.refresh_interval = any_of<int32_t>(random, {0, 0, 2});
    } else if (std::string(policy.cache) != "none") {
      policy.refresh = any_of<int32_t>(random, {0, 0, 5});
    }
  }
  const std::string cache = policy.cache;
  const bool may_start_from_noise =
      (cache == "none" || cache == "block") && shift == 0 && policy.next_block == 1;
  if (is_noised || (!is_verified && may_start_from_noise && random() % 3 == 0)) {
    choose_noise(random, policy);
  } else {
    if (random() % 4 == 0) policy.select = "sample", policy.temperature = 0.8;
    if (!is_verified && random() % 4 == 0) policy.cfg_scale = 0.7;
  }
  const bool is_autoregressive = visible_block == 1 && shift == 1;
  const int32_t mask = is_noised || is_autoregressive ? kVocabulary : kMask;
  Wish wish{dlm::check_policy(policy), {}, {}};
  const size_t given = 1 + random() % 30, wanted = 1 + random() % 40;
  for (size_t i = 0; i < given + wanted; ++i)
    wish.canvas.push_back(i < given && (is_verified || is_noised || random() % 12 != 0)
                              ? static_cast<int32_t>(2 + random() % (kVocabulary - 2))
                              : mask);
  if (random() % 5 == 0) wish.limits.max_steps = static_cast<int32_t>(1 + random() % 6);
  return wish;
}

// Adds a constraint to half of the requests that generate text only after a prompt.
void constrain(std::mt19937& random, int32_t mask, Wish& wish) {
  const auto first = std::find(wish.canvas.begin(), wish.canvas.end(), mask);
  const bool has_gaps = std::any_of(first, wish.canvas.end(), [&](int32_t t) { return t != mask; });
  const auto& constraint = constraints()[random() % constraints().size()];
  if (random() % 2 == 0 && !has_gaps && constraint->distances[0] <= wish.canvas.end() - first)
    wish.constraint = constraint;
}

// Runs the request alone, as in a session, and returns the result.
std::shared_ptr<dlm::Job> run_alone(const dlm::Denoiser& of, Summing& engine, const Wish& wish) {
  dlm::LockstepPasses passes(of, engine, {INT64_MAX, INT64_MAX}, 1);
  dlm::Runner runner(of, passes, {});
  const auto job = runner.submit(wish.make(of, engine), wish.limits.make());
  runner.run(dlm::Runner::Until::idle, [] { return true; });
  return job;
}

// Returns true if both jobs have the same canvas, ended for the same reason, and have the same
// statistics. Times may differ. The number of prefill passes may differ too, because a limit of the
// scheduler may split a prefill pass. With a window, the parts of a split pass take fewer bytes.
bool same(const dlm::Job& job, const std::shared_ptr<dlm::Job>& alone, bool has_window = false) {
  const dlm_result &one = job.result(), &other = alone->result();
  const auto equal = [](float a, float b) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
  };
  const dlm_stats &counts = *one.stats, &counted = *other.stats;
  return one.status == DLM_OK && canvas_of(job) == canvas_of(*alone) &&
         one.finish == other.finish && one.completion_tokens == other.completion_tokens &&
         std::equal(one.undecided, one.undecided + one.length, other.undecided) &&
         std::equal(one.log_probs, one.log_probs + one.length, other.log_probs, equal) &&
         counts.prefill_passes >= counted.prefill_passes &&
         counts.denoise_passes == counted.denoise_passes &&
         counts.store_passes == counted.store_passes &&
         counts.verify_passes == counted.verify_passes &&
         counts.verified_tokens == counted.verified_tokens &&
         (has_window ? counts.cache_bytes <= counted.cache_bytes
                     : counts.cache_bytes == counted.cache_bytes);
}

// Returns true if both jobs decided the same tokens and ended for the same reason.
bool same_answer(const dlm::Job& job, const std::shared_ptr<dlm::Job>& alone) {
  const dlm_result &one = job.result(), &other = alone->result();
  return one.status == DLM_OK && canvas_of(job) == canvas_of(*alone) &&
         one.finish == other.finish && one.stats->store_passes == other.stats->store_passes;
}

const uint64_t kRowBytes = 2 * (2 + 1) * 2 * 4;  // bytes of one token's keys and values, see
                                                 // shape()

const std::function<bool()> kNothing = [] { return true; };

void test_random_requests(uint32_t seed, bool shares) {
  std::mt19937 random(seed);
  const int32_t visible_block = any_of<int32_t>(random, {0, 1, 4, 8}),
                shift = static_cast<int32_t>(random() % 2);
  const bool is_causal = visible_block == 1 && shift == 1,
             is_noised = visible_block == 1 && !is_causal && random() % 2 == 0;
  dlm::Denoiser whole = is_causal   ? autoregressive_denoiser()
                        : is_noised ? noised_denoiser()
                                    : denoiser(visible_block, shift);
  whole.blocks_after_prompt = visible_block > 1 && random() % 2 == 0;
  const int32_t seen_block = whole.blocks_after_prompt ? kLongest : visible_block;
  // A denoiser with draft passes may have a window. Then `other` keeps the rows of all positions,
  // and `of` keeps only those in the window.
  const int32_t window =
      visible_block == 1 && !is_causal ? any_of<int32_t>(random, {0, 1, 3, 9, 20, 100}) : 0;
  dlm::Denoiser of = whole;
  of.cache = shape(window);
  Summing engine(of.cache, seen_block, shares, is_noised, window, is_causal),
      windowed(of.cache, seen_block, false, is_noised, window, is_causal),
      other(whole.cache, seen_block, false, is_noised, window, is_causal);
  const int64_t rows = 16 * (10 + static_cast<int64_t>(random() % 20));
  // A canvas needs at most 96 rows. With guidance, there are two canvases.
  const int64_t window_rows = 16 * (12 + static_cast<int64_t>(random() % 10));
  Scheduler scheduler(
      of, engine,
      {static_cast<int32_t>(1 + random() % 9), 100, static_cast<int32_t>(8 + random() % 200)}, rows,
      0, window_rows);
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  const auto submit = [&] {
    wishes.push_back(make_wish(random, visible_block, shift, is_noised, whole.blocks_after_prompt));
    constrain(random, of.mask_token_id, wishes.back());
    jobs.push_back(scheduler.submit(wishes.back().make(of, engine), wishes.back().limits));
  };
  for (int i = 0; i < 4; ++i) submit();
  scheduler.run(true, [&] {
    if (jobs.size() < 16 && random() % 3 == 0) submit();  // some requests join while others run
    return true;
  });
  for (size_t i = 0; i < jobs.size(); ++i) {
    CHECK(jobs[i]->wait(dlm::Clock::duration{}) &&
          same(*jobs[i], run_alone(whole, other, wishes[i]), window > 0));
    CHECK(same_answer(*jobs[i], run_alone(of, windowed, wishes[i])));
    CHECK(wishes[i].is_legal(*jobs[i], of.mask_token_id));
    const dlm::RowCounts reserved = rows_of(wishes[i].make(of, engine), 16);
    const uint64_t window_row = dlm::window_row_bytes(of.cache);
    if (shares && window > 0)
      CHECK(jobs[i]->result().stats->cache_bytes <=
            static_cast<uint64_t>(reserved.full) * (kRowBytes - window_row) +
                static_cast<uint64_t>(reserved.window) * window_row);
  }
  const dlm_scheduler_stats stats = scheduler.told();
  CHECK(stats.waiting == 0 && stats.running == 0 &&
        stats.finished == static_cast<int64_t>(jobs.size()) && stats.refused == 0);
  CHECK(stats.shares >= stats.passes && (shares || stats.shares == stats.passes));
}

// Saves and loads a prompt cache with the whole pages of a prompt.
void load_prompt(const dlm::Denoiser& of, dlm::Engine& engine, std::vector<int32_t> prompt,
                 dlm::PromptCaches& files) {
  const int32_t page = dlm::page_rows(of.visible_block);
  prompt.resize(prompt.size() / page * page);
  if (prompt.empty()) return;
  const dlm::PromptCacheFormat format{std::string(64, 'a'), 1, page, page * kRowBytes,
                                      of.vocab_size};
  const std::string path = "/tmp/dlm-runner-test-" + std::to_string(getpid()) + ".cache";
  dlm::save_prompt(of, engine, format, prompt, path, [] {});
  files.add(std::make_unique<const dlm::PromptCache>(path, format));
  unlink(path.c_str());
}

// Requests reuse keys and values if their prompts start with the tokens of an earlier request or of
// a prompt cache. The reuse must not change the answers.
void test_prefixes(uint32_t seed) {
  std::mt19937 random(seed);
  const int32_t visible_block = any_of<int32_t>(random, {1, 4, 8, 16, 32}),
                shift = visible_block == 1 ? 0 : static_cast<int32_t>(random() % 2),
                page = dlm::page_rows(visible_block);
  const bool is_noised = visible_block == 1 && random() % 2 == 0;
  const dlm::Denoiser whole = is_noised ? noised_denoiser() : denoiser(visible_block, shift);
  const int32_t window =
      visible_block == 1 ? any_of<int32_t>(random, {0, 1, 9, 16, 17, 30, 40, 100}) : 0;
  dlm::Denoiser of = whole;
  of.cache = shape(window);
  Summing engine(of.cache, visible_block, true, is_noised, window),
      other(whole.cache, visible_block, false, is_noised, window);
  const int64_t rows = page * (8 + static_cast<int64_t>(random() % 20));
  const int64_t window_rows = page * (8 + static_cast<int64_t>(random() % 20));
  const int64_t most_idle = any_of<int64_t>(random, {0, 1, page, 3 * page, rows});
  const bool has_files = random() % 2 == 0;
  Summing other_sharing(of.cache, visible_block, true, is_noised, window);
  Scheduler scheduler(
      of, engine,
      {static_cast<int32_t>(1 + random() % 5), 100, static_cast<int32_t>(8 + random() % 200)}, rows,
      most_idle, window_rows);
  // There are only a few different prompts, so that many requests start with the same tokens. Some
  // prompts continue an earlier answer.
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  const auto submit = [&] {
    std::vector<int32_t> prompt;
    if (!prompts.empty() && random() % 5 != 0) {
      prompt = any_of(random, prompts);
      prompt.resize(std::min(prompt.size(), size_t{64}));
      if (random() % 2 == 0 && !prompt.empty()) prompt.resize(1 + random() % prompt.size());
    }
    for (size_t more = random() % 40; more > 0 && prompt.size() < 70; --more)
      prompt.push_back(static_cast<int32_t>(2 + random() % (kVocabulary - 2)));
    Wish wish = make_wish(random, visible_block, shift, is_noised);
    wish.canvas = prompt;
    wish.canvas.resize(std::min(prompt.size() + 1 + random() % 30, size_t{96}), of.mask_token_id);
    const bool is_verified = wish.policy.commit == dlm::Commit::verify,
               is_whole = std::count(prompt.begin(), prompt.end(), of.mask_token_id) == 0;
    if (is_verified && (prompt.empty() || !is_whole)) return;
    if (!rows_of(wish.make(of, engine), page).fits({rows, window_rows})) return;
    wishes.push_back(wish);
    prompts.push_back(prompt);
    jobs.push_back(scheduler.submit(wish.make(of, engine), wish.limits));
  };
  submit();
  size_t read = 0;
  scheduler.run(true, [&] {
    if (jobs.size() < 30 && random() % 2 == 0) submit();
    for (; read < jobs.size() && jobs[read]->wait(dlm::Clock::duration{}); ++read)
      if (jobs[read]->result().status == DLM_OK) prompts.push_back(canvas_of(*jobs[read]));
    if (has_files && random() % 8 == 0)
      load_prompt(of, other_sharing, any_of(random, prompts), scheduler.files());
    return true;
  });
  int64_t hits = 0, tokens = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto alone = run_alone(whole, other, wishes[i]);
    const int32_t cached = jobs[i]->result().stats->cached_tokens;
    hits += cached > 0, tokens += cached;
    CHECK(same_answer(*jobs[i], alone));
    CHECK(cached % visible_block == 0 && cached < static_cast<int32_t>(wishes[i].canvas.size()));
  }
  const dlm_scheduler_stats stats = scheduler.told();
  CHECK(stats.prefix_hits == hits && stats.prefix_tokens == tokens);
  CHECK(most_idle > 0 || has_files || hits == 0);
  CHECK(stats.prefix_bytes <= static_cast<uint64_t>(most_idle) * kRowBytes);
  const uint64_t window_row = dlm::window_row_bytes(of.cache);
  CHECK(stats.cache_bytes <= static_cast<uint64_t>(rows) * (kRowBytes - window_row) +
                                 static_cast<uint64_t>(window_rows) * window_row);
  (window > 0 ? window_hits : all_hits) += hits;
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const dlm::Error& error) {
    return error.what();
  }
  return "";
}

// The runtime detects every changed byte and every missing byte of a prompt cache.
void test_damaged_prompt_caches() {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, true);
  const dlm::PromptCacheFormat format{std::string(64, 'a'), 1, 16, 16 * kRowBytes, of.vocab_size};
  const std::string path = "/tmp/dlm-runner-test-" + std::to_string(getpid()) + ".damaged";
  const std::vector<int32_t> prompt(32, 5);
  dlm::save_prompt(of, engine, format, prompt, path, [] {});
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const auto refusal = [&](const std::string& content, const dlm::PromptCacheFormat& expected) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
    return message_of([&] { dlm::PromptCache(path, expected); });
  };
  CHECK(refusal(whole, format).empty());
  CHECK(dlm::PromptCache(path, format).tokens() == prompt);
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ (1 << (at % 8)));
    CHECK(!refusal(changed, format).empty());
  }
  for (size_t size = 0; size < whole.size(); size += 1 + size / 16)
    CHECK(!refusal(whole.substr(0, size), format).empty());
  CHECK(!refusal(whole + whole, format).empty());
  dlm::PromptCacheFormat other = format;
  other.graph_sha256[63] = 'b';
  CHECK(refusal(whole, other).find("saved with a different bundle") != std::string::npos);
  other = format, other.cache_type = 3;
  CHECK(refusal(whole, other).find("are float32, but this bundle's keys and values are int8") !=
        std::string::npos);
  other = format, other.page_rows = 32, other.page_bytes *= 2;
  CHECK(refusal(whole, other).find("pages have a size") != std::string::npos);
  other = format, other.vocab_size = 5;
  CHECK(refusal(whole, other).find("token 5 is outside") != std::string::npos);
  unlink(path.c_str());
  CHECK(message_of([&] { dlm::PromptCache(path, format); }).find("cannot read") !=
        std::string::npos);
  CHECK(message_of([&] {
          dlm::save_prompt(of, engine, format, prompt, "/none/x", [] {});
        }).find("/none/x: cannot write") != std::string::npos);
}

// In layers with a window, the number of rows does not grow with the length of the canvas, and the
// scheduler needs no room for more rows.
void test_a_window_limits_the_cache() {
  constexpr int32_t kWindow = 9, kBlock = 8, kPage = 16;
  const dlm::Denoiser whole = noised_denoiser();
  dlm::Denoiser of = whole;
  of.cache = shape(kWindow);
  Summing engine(of.cache, 1, true, true, kWindow), other(whole.cache, 1, false, true, kWindow);
  // The last 9 + 8 rows can lie in three pages of 16 rows.
  const int64_t window_rows = dlm::window_rows(kLongest, kWindow + kBlock, kPage);
  CHECK(window_rows == 3 * kPage);
  Scheduler scheduler(of, engine, {1, 100, 16}, kLongest, kLongest, window_rows);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block", policy.remask = "noise", policy.commit = "entropy_bound";
  policy.block_length = kBlock, policy.steps_per_block = 2, policy.stop = "none";
  const uint64_t window_row = dlm::window_row_bytes(of.cache), row = kRowBytes - window_row;
  std::vector<uint64_t> bytes;
  for (const size_t given : {1, 20, 40, 60, 80}) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(given, 5), {}};
    wish.canvas.resize(given + 2 * kBlock, kVocabulary);
    const auto job = scheduler.submit(wish.make(of, engine), {});
    scheduler.run(true, kNothing);
    CHECK(same_answer(*job, run_alone(whole, other, wish)));
    // The rows of the last block are never stored.
    bytes.push_back(job->result().stats->cache_bytes - (given + kBlock) * row);
    CHECK(bytes.back() <= static_cast<uint64_t>(window_rows) * window_row);
  }
  CHECK(bytes.front() == (1 + kBlock) * window_row);
  CHECK(scheduler.told().cache_bytes <=
        kLongest * row + static_cast<uint64_t>(window_rows) * window_row);
  // A block of 40 tokens needs 5 pages, because a later pass may start 40 tokens earlier.
  policy.block_length = 40;
  Wish wish{dlm::check_policy(policy), std::vector<int32_t>(80, kVocabulary), {}};
  const std::string said = message_of([&] { scheduler.submit(wish.make(of, engine), {}); });
  CHECK(said.find("in layers with a window, this request needs cache for 80 tokens, but the "
                  "scheduler has room for 48") == 0);
}

// In layers with a sliding window, a cached page may be missing. Then a request reuses a shorter
// part of its prompt.
void test_a_window_limits_reuse() {
  constexpr int32_t kWindow = 16, kPage = 16;
  const dlm::Denoiser whole = noised_denoiser();
  dlm::Denoiser of = whole;
  of.cache = shape(kWindow);
  Summing engine(of.cache, 1, true, true, kWindow), other(whole.cache, 1, false, true, kWindow);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block", policy.remask = "noise", policy.commit = "entropy_bound";
  policy.block_length = 8, policy.steps_per_block = 2;
  for (const int64_t window_pages : {3, 4, 12}) {
    Scheduler scheduler(of, engine, {1, 100, 16}, 10 * kLongest, 10 * kLongest,
                        window_pages * kPage);
    std::vector<int32_t> reused;
    for (const size_t given : {80, 80, 16}) {
      Wish wish{dlm::check_policy(policy), std::vector<int32_t>(given, 5), {}};
      wish.canvas.resize(given + 8, kVocabulary);
      const auto job = scheduler.submit(wish.make(of, engine), {});
      scheduler.run(true, kNothing);
      CHECK(same_answer(*job, run_alone(whole, other, wish)));
      reused.push_back(job->result().stats->cached_tokens);
    }
    CHECK(reused[0] == 0 && reused[1] == 80);
    CHECK(reused[2] == (window_pages == 12 ? 16 : 0));
  }
}

// With guidance, both canvases reuse the same number of tokens. If the second canvas can reuse
// fewer tokens, the first canvas may lack the rows for this number.
void test_guidance_and_a_window_limit_reuse() {
  constexpr int32_t kWindow = 16, kPage = 16;
  const dlm::Denoiser whole = denoiser(1, 0);
  dlm::Denoiser of = whole;
  of.cache = shape(kWindow);
  Summing engine(of.cache, 1, true, false, kWindow), other(whole.cache, 1, false, false, kWindow);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block", policy.block_length = 8, policy.steps_per_block = 2;
  int32_t most = 0;
  for (int64_t window_pages = 6; window_pages < 16; ++window_pages) {
    Scheduler scheduler(of, engine, {1, 100, 16}, 10 * kLongest, 10 * kLongest,
                        window_pages * kPage);
    const auto run = [&](size_t given, int32_t token, double cfg_scale) {
      policy.cfg_scale = cfg_scale;
      Wish wish{dlm::check_policy(policy), std::vector<int32_t>(given, token), {}};
      wish.canvas.resize(given + 8, kMask);
      const auto job = scheduler.submit(wish.make(of, engine), {});
      scheduler.run(true, kNothing);
      CHECK(job->result().status == DLM_OK && same_answer(*job, run_alone(whole, other, wish)));
      return job->result().stats->cached_tokens;
    };
    CHECK(run(80, 5, 0) == 0);
    CHECK(run(32, 6, 0.7) == 0);
    const int32_t reused = run(80, 5, 0.7);
    CHECK(reused == 0 || reused == 32);
    most = std::max(most, reused);
  }
  CHECK(most == 32);
}

// Requests with the same prompt join while others run, and the layers with a window keep few pages
// of requests that have ended. A request must not lose a page that it is about to use.
void test_a_window_with_few_idle_pages(int32_t window, int64_t most_idle) {
  const dlm::Denoiser whole = noised_denoiser();
  dlm::Denoiser of = whole;
  of.cache = shape(window);
  Summing engine(of.cache, 1, true, true, window), other(whole.cache, 1, false, true, window);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block", policy.remask = "noise", policy.commit = "entropy_bound";
  policy.block_length = 8, policy.steps_per_block = 1, policy.stop = "none";
  for (int32_t most_tokens = 15; most_tokens < 50; most_tokens += 3) {
    Scheduler scheduler(of, engine, {3, 100, most_tokens}, 10 * kLongest, most_idle, 10 * kLongest);
    std::vector<Wish> wishes;
    std::vector<std::shared_ptr<dlm::Job>> jobs;
    const auto submit = [&](size_t given) {
      Wish wish{dlm::check_policy(policy), std::vector<int32_t>(given, 5), {}};
      wish.canvas.resize(given + 8, kVocabulary);
      wishes.push_back(wish);
      jobs.push_back(scheduler.submit(wish.make(of, engine), {}));
    };
    submit(48);
    int passes = 0;
    scheduler.run(true, [&] {
      if (const int stored = (48 + most_tokens - 1) / most_tokens; passes++ == stored)
        submit(88), submit(88);
      return true;
    });
    for (size_t i = 0; i < jobs.size(); ++i)
      CHECK(same_answer(*jobs[i], run_alone(whole, other, wishes[i])));
  }
}

// The passes of a second request with the same prompt do not compute the prompt again.
void test_a_second_request_reuses_its_prompt(int32_t shift) {
  const dlm::Denoiser of = denoiser(4, shift);
  Summing engine(shape(), 4, true);
  Scheduler scheduler(of, engine, {4, 100, 1 << 20}, 960, 960);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block";
  policy.block_length = 0;
  const auto run = [&](size_t given, int32_t first) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(given, 2), {}};
    wish.canvas.front() = first;
    wish.canvas.resize(given + 8, kMask);
    const auto job = scheduler.submit(wish.make(of, engine), {});
    scheduler.run(true, kNothing);
    CHECK(job->result().status == DLM_OK);
    return *job->result().stats;
  };
  CHECK(run(64, 5).cached_tokens == 0);
  // With a shifted denoiser, the last row of the prompt predicts the first new token. So the
  // request computes the last page of the prompt again.
  const dlm_stats again = run(64, 5);
  CHECK(again.cached_tokens == (shift == 0 ? 64 : 48));
  CHECK(again.prefill_passes == (shift == 0 ? 0 : 1));
  CHECK(run(65, 5).cached_tokens == (shift == 0 ? 64 : 48));
  CHECK(run(63, 5).cached_tokens == 48);
  CHECK(run(64, 6).cached_tokens == 0);  // the first token differs
}

// With full attention and reuse_prompt, a request uses keys and values of an earlier prompt. If
// both requests are equal, their answers are equal too.
void test_full_attention_reuses_prompts_if_asked(bool reuses, const char* cache) {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  Scheduler scheduler(of, engine, {4, 100, 1 << 20}, 960, 960);
  dlm_policy policy = dlm::default_policy();
  policy.cache = cache;
  policy.refresh = 8, policy.block_length = 8, policy.reuse_prompt = reuses ? 1 : 0;
  const auto run = [&](int32_t last) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(60, 2), {}};
    wish.canvas.back() = last;
    wish.canvas.resize(84, kMask);
    const auto job = scheduler.submit(wish.make(of, engine), {});
    scheduler.run(true, kNothing);
    CHECK(job->result().status == DLM_OK);
    return job;
  };
  const auto first = run(5), again = run(5), other = run(6);
  CHECK(canvas_of(*first) == canvas_of(*again));
  CHECK(first->result().stats->nfe == again->result().stats->nfe);
  // The number of tokens in the whole pages before the last 8 tokens of the prompt.
  const int32_t expected = reuses ? 48 : 0;
  CHECK(first->result().stats->cached_tokens == 0);
  CHECK(again->result().stats->cached_tokens == expected);
  CHECK(other->result().stats->cached_tokens == expected);
}

// Requests with the same prompt that start at the same time compute the prompt only once.
void test_requests_at_once_share_their_prompt(int32_t shift) {
  const dlm::Denoiser of = denoiser(4, shift);
  Summing engine(shape(), 4, true), other(shape(), 4, false);
  Scheduler scheduler(of, engine, {8, 100, 32}, 960, 960);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "block";
  policy.block_length = 4;
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int32_t own = 0; own < 8; ++own) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(64, 7), {}};
    wish.canvas.push_back(2 + own);
    wish.canvas.resize(76, kMask);
    wishes.push_back(wish);
    jobs.push_back(scheduler.submit(wish.make(of, engine), {}));
  }
  scheduler.run(true, kNothing);
  int32_t reused = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    CHECK(same_answer(*jobs[i], run_alone(of, other, wishes[i])));
    reused += jobs[i]->result().stats->cached_tokens;
  }
  // For each page, one of the eight requests computes the page. But with a shifted denoiser, every
  // request computes the last page before the first block.
  CHECK(reused == 7 * (shift == 0 ? 64 : 48) && scheduler.told().prefix_tokens == reused);
}

// A long prompt is computed in parts. Passes of another request run between the parts.
void test_long_prompts_are_split(int32_t shift) {
  const dlm::Denoiser of = denoiser(4, shift);
  Summing engine(shape(), 4, true), other(shape(), 4, false);
  const dlm::PassCost cost{1, 0.1, 0, 0.001};
  engine.count_by(cost);
  for (const double most_ms : {0.0, 4.0}) {
    Scheduler scheduler(of, engine, {4, 100, most_ms > 0 ? 1 << 20 : 16, most_ms, cost}, 960);
    dlm_policy policy = dlm::default_policy();
    policy.cache = "block";
    policy.block_length = 4;
    Wish brief{dlm::check_policy(policy), std::vector<int32_t>(20, kMask), {}};
    Wish lengthy{brief.policy, std::vector<int32_t>(88, 5), {}};
    lengthy.canvas.resize(96, kMask);
    const auto one = scheduler.submit(brief.make(of, engine), {});
    const auto two = scheduler.submit(lengthy.make(of, engine), {});
    scheduler.run(true, kNothing);
    const auto alone = run_alone(of, other, lengthy);
    CHECK(same(*one, run_alone(of, other, brief)) && same(*two, alone));
    CHECK(alone->result().stats->prefill_passes == 1);
    // A prompt of 88 tokens is computed in parts of at most 16 tokens. With the cost model, parts
    // get smaller as passes read more rows.
    const int32_t parts = two->result().stats->prefill_passes;
    CHECK(most_ms > 0 ? parts >= 4 : parts == 6);
    CHECK(most_ms == 0 || engine.costliest_shared() <= most_ms);
    CHECK(scheduler.told().shares > scheduler.told().passes);
  }
}

// Compares the class Pages with a simple model, which knows the tokens of each page.
void test_pages(uint32_t seed) {
  std::mt19937 random(seed);
  constexpr int32_t kPages = 24;
  constexpr size_t kRows = 2;
  const auto most_idle = static_cast<int32_t>(random() % (kPages + 1));
  dlm::Pages pages(kPages, most_idle);
  std::vector<std::vector<int32_t>> contents(kPages);  // for each page, the root, and the tokens
                                                       // from the start to the end of the page
  struct User {
    std::vector<int32_t> pages, tokens;
    size_t shared;
    int32_t root;

    std::vector<int32_t> content(size_t page) const {
      std::vector<int32_t> found{root};
      found.insert(found.end(), tokens.begin(),
                   tokens.begin() + static_cast<std::ptrdiff_t>((page + 1) * kRows));
      return found;
    }
  };
  std::vector<User> users;
  for (int step = 0; step < 300; ++step) {
    if (random() % 3 != 0) {
      User user{{},
                std::vector<int32_t>(kRows * (1 + random() % 6)),
                0,
                -1 - static_cast<int32_t>(random() % 2)};
      for (int32_t& token : user.tokens) token = static_cast<int32_t>(random() % 2);
      const size_t count = user.tokens.size() / kRows;
      const auto found = pages.find(user.root, user.tokens.data(), kRows, count);
      const auto fresh = static_cast<int32_t>(count - found.pages.size());
      if (fresh + found.idle > pages.unused()) continue;
      user.pages = found.pages, user.shared = found.pages.size();
      for (size_t i = 0; i < user.shared; ++i) CHECK(contents[user.pages[i]] == user.content(i));
      for (const int32_t page : found.pages) pages.use(page);
      while (user.pages.size() < count) user.pages.push_back(pages.take());
      for (size_t i = user.shared; i < count; ++i) contents[user.pages[i]] = {-1};
      users.push_back(user);
    } else if (!users.empty()) {
      const size_t which = random() % users.size();
      User& user = users[which];
      for (size_t left = random() % 7; left > 0 && user.shared < user.pages.size(); --left) {
        const size_t i = user.shared++;
        const int32_t page = pages.share(user.pages[i], i == 0 ? user.root : user.pages[i - 1],
                                         user.tokens.data() + i * kRows, kRows);
        if (page == user.pages[i]) contents[page] = user.content(i);
        CHECK(contents[page] == user.content(i));
        user.pages[i] = page;
      }
      if (random() % 2 == 0) {
        pages.give_back(user.pages);
        users.erase(users.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
    std::vector<bool> is_used(kPages);
    size_t all = 0;
    for (const User& user : users) {
      for (const int32_t page : user.pages) is_used[page] = true;
      all += user.pages.size();
    }
    const auto used = std::count(is_used.begin(), is_used.end(), true);
    CHECK(pages.unused() == kPages - used && pages.idle() <= most_idle);
    CHECK(pages.saved() == static_cast<int64_t>(all) - used);
  }
}

void test_passes_are_shared() {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  Scheduler scheduler(of, engine, {8, 100, 1 << 20}, 2000);
  dlm_policy policy = dlm::default_policy();
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (size_t i = 0; i < 8; ++i) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(5 + i, 2), {}};
    wish.canvas.resize(wish.canvas.size() + 8, kMask);
    jobs.push_back(scheduler.submit(wish.make(of, engine), {}));
  }
  scheduler.run(true, kNothing);
  CHECK(engine.most_requests() == 8);
  CHECK(scheduler.told().passes == 8);  // eight passes, and each pass has one token of each request
}

// The predicted time of a shared pass stays within the limit. A request that does not fit waits for
// a later pass.
void test_costs(uint32_t seed) {
  std::mt19937 random(seed);
  const int32_t visible_block = any_of<int32_t>(random, {0, 4}),
                shift = static_cast<int32_t>(random() % 2);
  const dlm::Denoiser of = denoiser(visible_block, shift);
  Summing engine(shape(), visible_block, true), other(shape(), visible_block, false);
  const auto figure = [&](double most) { return most * static_cast<double>(random() % 100) / 100; };
  const dlm::PassCost cost{figure(4), 0.01 + figure(1), figure(0.5), figure(0.05)};
  engine.count_by(cost);
  const double most_ms = 1 + figure(60);
  Scheduler scheduler(of, engine, {9, 100, 1 << 20, most_ms, cost}, 1000);
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int i = 0; i < 12; ++i) {
    wishes.push_back(make_wish(random, visible_block, shift));
    wishes.back().policy.cfg_scale = 0;  // without guidance, a request is a single segment
    jobs.push_back(scheduler.submit(wishes.back().make(of, engine), wishes.back().limits));
  }
  scheduler.run(true, kNothing);
  // A pass that only stores rows still scores one row. The cost of this row does not count for any
  // request.
  CHECK(engine.costliest_shared() <= most_ms + cost.row);
  for (size_t i = 0; i < jobs.size(); ++i) CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
  const double expected = 1000 * scheduler.told().expected_s;
  CHECK(expected <= engine.cost() * (1 + 1e-9));
  CHECK(expected >= engine.cost() - cost.row * static_cast<double>(scheduler.told().passes) - 1e-6);
}

// A request starts only if no other request is running, or if passes with this request stay within
// the time limit.
void test_admission_by_cost() {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "dual";
  policy.block_length = 4;
  const Wish wish{dlm::check_policy(policy), std::vector<int32_t>(8, kMask), {}};
  int64_t passes = 0;
  const auto most_running = [&](double most_ms, double token_ms = 1) {
    Scheduler scheduler(of, engine, {8, 100, 1 << 20, most_ms, {token_ms, token_ms, 0, 0}}, 2000);
    for (int i = 0; i < 8; ++i) scheduler.submit(wish.make(of, engine), {});
    int32_t most = 0;
    scheduler.run(true, [&] {
      most = std::max(most, scheduler.told().running);
      return true;
    });
    CHECK(scheduler.told().finished == 8);
    passes = scheduler.told().passes;
    return most;
  };
  CHECK(most_running(0) == 8);
  CHECK(most_running(13) == 3);  // each request has a block of four tokens, and each token costs
                                 // one millisecond
  CHECK(most_running(12.9) == 2);
  CHECK(most_running(0.1) == 1);
  // If passes take much longer than predicted, later passes contain fewer requests.
  CHECK(most_running(130, 10) == 3);
  const int64_t before = passes;
  engine.take(std::chrono::milliseconds(4));
  CHECK(most_running(1.3, 0.1) == 3);
  CHECK(passes > before);
}

// If a pass fails, the requests in this pass end with its message. Other requests do not end.
void test_failures_stay_with_their_requests(bool shares) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(5);
  Scheduler scheduler(of, engine, {2, 100, 1 << 20}, 1000);
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int i = 0; i < 6; ++i) {
    wishes.push_back(make_wish(random, 4, 0));
    wishes.back().limits = {};
    jobs.push_back(scheduler.submit(wishes.back().make(of, engine), {}));
  }
  engine.fail_after(3);
  scheduler.run(true, kNothing);
  int failures = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i]->result().status == DLM_OK) {
      CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
      continue;
    }
    ++failures;
    CHECK(jobs[i]->result().status == DLM_ENGINE_FAILED &&
          std::string(jobs[i]->result().message) == "made to fail");
  }
  CHECK(failures >= 1 && failures <= 2);
}

// If a request fails, even while it ends, no other request fails. All threads that wait for a
// request wake up, and the results of the other requests do not change.
void test_faults_stay_with_their_requests(bool shares, Fault fault) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(7);
  std::shared_ptr<dlm::Job> faulty[3];
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  const auto throws = [](void*, const dlm_step*) -> int32_t { throw NotAnException{}; };
  {
    Scheduler scheduler(of, engine, {4, 100, 1 << 20}, 1000);
    const auto submit_faulty = [&](Limits limits) {
      if (fault == Fault::step) limits.on_step = throws;
      Wish wish = make_wish(random, 4, 0);
      wish.policy.cfg_scale = 0;  // with guidance, requests do not call the proposer's needs()
      wish.canvas = std::vector<int32_t>(20, kMask);
      return scheduler.submit(wish.make(of, engine, fault), limits);
    };
    faulty[0] = submit_faulty({});  // cancelled before it runs
    faulty[0]->cancel();
    faulty[1] = submit_faulty({0, dlm::Clock::now(), nullptr, nullptr});
    for (int i = 0; i < 6; ++i) {
      wishes.push_back(make_wish(random, 4, 0));
      wishes.back().limits = {};
      jobs.push_back(scheduler.submit(wishes.back().make(of, engine), {}));
      if (i == 2) faulty[2] = submit_faulty({1, {}, nullptr, nullptr});  // ended while it runs
    }
    scheduler.run(true, kNothing);
    CHECK(scheduler.told().running == 0 && scheduler.told().waiting == 0 &&
          scheduler.told().finished == 9);
  }
  const bool fails_in_end =
      fault == Fault::end || fault == Fault::end_foreign || fault == Fault::end_memory;
  const dlm_status wanted = fault == Fault::end_memory ? DLM_OUT_OF_MEMORY
                            : fault == Fault::end_foreign || fault == Fault::step ? DLM_INTERNAL
                                                                                  : DLM_BAD_BUNDLE;
  for (size_t i = 0; i < 3; ++i) {
    const dlm::Job& job = *faulty[i];
    CHECK(job.wait(dlm::Clock::duration{}));
    if (i < 2 && !fails_in_end && fault != Fault::step)
      CHECK(job.result().status == DLM_OK &&
            finish_of(job) == (i == 0 ? DLM_FINISH_CANCELLED : DLM_FINISH_DEADLINE));
    else
      CHECK(job.result().status == wanted && job.result().message[0] != '\0');
    CHECK(job.result().length == 20);
  }
  for (size_t i = 0; i < jobs.size(); ++i) CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
}

// A scheduler is destroyed while a request runs, and ending this request throws an error.
void test_faults_as_a_scheduler_is_destroyed() {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, true);
  std::mt19937 random(8);
  std::shared_ptr<dlm::Job> job;
  {
    Scheduler scheduler(of, engine, {4, 100, 1 << 20}, 1000);
    Wish wish = make_wish(random, 4, 0);
    job = scheduler.submit(wish.make(of, engine, Fault::end), {});
  }
  CHECK(job->wait({}) && job->result().status == DLM_BAD_BUNDLE &&
        std::string(job->result().message) == "made to fail");
}

// An error that does not belong to a single request ends all running and waiting requests. Until
// run() is called again, submit() throws this error.
void test_an_error_of_nobody_ends_all(bool shares) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(9);
  Scheduler scheduler(of, engine, {2, 100, 1 << 20}, 1000);
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int i = 0; i < 6; ++i) {
    Wish wish = make_wish(random, 4, 0);
    wish.canvas.resize(40, kMask);
    jobs.push_back(
        scheduler.submit(wish.make(of, engine, i % 2 == 0 ? Fault::none : Fault::end), {}));
  }
  std::atomic<int> woken{0};
  std::vector<std::thread> threads;
  for (const auto& job : jobs) threads.emplace_back([&woken, job] { job->wait({}), ++woken; });
  int calls = 0;
  dlm_status status = DLM_OK;
  try {
    scheduler.run(true, [&]() -> bool {
      return ++calls < 2 ? true : throw dlm::Error(DLM_ENGINE_FAILED, "no engine any more");
    });
  } catch (const dlm::Error& error) {
    status = error.status();
  }
  CHECK(status == DLM_ENGINE_FAILED);
  for (std::thread& thread : threads) thread.join();
  CHECK(woken == 6);
  for (const auto& job : jobs)
    CHECK(job->result().status == DLM_ENGINE_FAILED &&
          std::string(job->result().message) == "no engine any more");
  CHECK(scheduler.told().running == 0 && scheduler.told().waiting == 0 &&
        scheduler.told().finished == 6);
  const Wish wish = make_wish(random, 4, 0);
  try {
    scheduler.submit(wish.make(of, engine), wish.limits);
    CHECK(false);
  } catch (const dlm::Error& error) {
    CHECK(error.status() == DLM_ENGINE_FAILED &&
          std::string(error.what()).find("no engine any more") != std::string::npos);
  }
  scheduler.run(true, kNothing);
  const auto job = scheduler.submit(wish.make(of, engine), wish.limits);
  scheduler.run(true, kNothing);
  CHECK(same(*job, run_alone(of, other, wish)));
}

void test_limits() {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  Scheduler scheduler(of, engine, {1, 2, 64}, 32);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "dual";
  policy.block_length = 4;
  const auto wish = [&](size_t length, Limits limits) {
    return Wish{dlm::check_policy(policy), std::vector<int32_t>(length, kMask), limits};
  };
  const auto submit = [&](const Wish& one) {
    return scheduler.submit(one.make(of, engine), one.limits);
  };
  const auto status_of = [&](const Wish& one) -> dlm_status {
    try {
      submit(one);
      return DLM_OK;
    } catch (const dlm::Error& error) {
      return error.status();
    }
  };
  // Needs more cache rows than the scheduler has.
  CHECK(status_of(wish(33, {})) == DLM_INVALID_ARGUMENT);
  const auto first = submit(wish(30, {})),
             second = submit(wish(8, {0, dlm::Clock::now(), nullptr, nullptr}));
  CHECK(status_of(wish(8, {})) == DLM_BUSY);
  CHECK(scheduler.told().refused == 1 && scheduler.told().waiting == 2);
  CHECK(!first->wait(std::chrono::milliseconds(1)));
  second->cancel();
  scheduler.run(true, kNothing);
  CHECK(finish_of(*first) == DLM_FINISH_LENGTH || finish_of(*first) == DLM_FINISH_STOP);
  CHECK(finish_of(*second) == DLM_FINISH_CANCELLED && second->result().stats->nfe == 0);
  CHECK(canvas_of(*second) == std::vector<int32_t>(8, kEnd));
  const auto late = submit(wish(8, {0, dlm::Clock::now(), nullptr, nullptr}));
  scheduler.run(true, kNothing);
  CHECK(finish_of(*late) == DLM_FINISH_DEADLINE && late->result().stats->nfe == 0);
  // The step callback counts the steps, and stops its request at the third step.
  int steps = 0;
  const auto count = [](void* user, const dlm_step* step) {
    return ++*static_cast<int*>(user) == 3 || step->nfe < 0 ? 1 : 0;
  };
  const auto stopped = submit(wish(20, {0, {}, count, &steps}));
  scheduler.run(true, kNothing);
  CHECK(stopped->result().status == DLM_CANCELLED && steps == 3);
  // If before_pass returns false, the requests remain, and the next run continues them.
  const auto kept = submit(wish(12, {}));
  int calls = 0;
  try {
    scheduler.run(true, [&] { return ++calls != 2; });
    CHECK(false);
  } catch (const dlm::Error& error) {
    CHECK(error.status() == DLM_CANCELLED);
  }
  CHECK(!kept->wait(dlm::Clock::duration{}));
  scheduler.run(true, kNothing);
  CHECK(kept->result().status == DLM_OK && kept->wait(dlm::Clock::duration{}));
  // If a scheduler is destroyed, its requests end as cancelled.
  std::shared_ptr<dlm::Job> abandoned;
  {
    Scheduler short_lived(of, engine, {1, 2, 64}, 32);
    abandoned = short_lived.submit(wish(8, {}).make(of, engine), {});
  }
  CHECK(abandoned->wait({}) && finish_of(*abandoned) == DLM_FINISH_CANCELLED);
}

// Four threads submit requests of every kind, some with a fault in one of their calls. Meanwhile,
// the thread that makes passes is stopped and restarted. Finally the scheduler is destroyed while
// it still has requests. All threads that wait for a request wake up, and the results of the other
// requests do not change.
void test_mixed_requests(bool shares, int requests_a_thread) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares);
  std::optional<Scheduler> scheduler(std::in_place, of, engine, dlm::Runner::Options{6, 1000, 128},
                                     400);
  std::atomic<bool> is_closed{false};
  std::atomic<int> wrong{0}, ended{0}, failed_jobs{0};
  std::thread runner([&] {
    for (int runs = 0; !is_closed; ++runs) {  // stop() may come before, during and after a run
      try {
        scheduler->run(false, [&] { return runs % 3 != 2; });
      } catch (const dlm::Error&) {
      }
    }
  });
  std::thread closer([&] {
    while (!is_closed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      scheduler->stop();
    }
  });
  const auto throws = [](void*, const dlm_step* step) -> int32_t {
    return step->nfe < 2 ? 0 : throw NotAnException{};
  };
  std::vector<std::shared_ptr<dlm::Job>> left;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      std::mt19937 random(100 + number);
      Summing other(shape(), 4, false);
      for (int i = 0; i < requests_a_thread; ++i) {
        Wish wish = make_wish(random, 4, 0);
        const auto fault = random() % 2 == 0 ? Fault::none : static_cast<Fault>(random() % 7);
        const bool is_late = random() % 6 == 0, is_cancelled = random() % 4 == 0,
                   is_left = random() % 10 == 0;
        Limits limits = wish.limits;
        if (is_late)
          limits.deadline = dlm::Clock::now() + std::chrono::microseconds(random() % 2000);
        if (fault == Fault::step) limits.on_step = throws;
        const auto job = scheduler->submit(wish.make(of, engine, fault), limits);
        if (is_cancelled) job->cancel();
        if (is_left) {
          const std::lock_guard<std::mutex> lock(mutex);
          left.push_back(job);
          continue;
        }
        job->wait({});
        ++ended;
        if (job->result().status != DLM_OK) {
          ++failed_jobs;
          if (fault == Fault::none) ++wrong;
          continue;
        }
        const auto finish = finish_of(*job);
        const bool is_cut = finish == DLM_FINISH_CANCELLED || finish == DLM_FINISH_DEADLINE;
        if (is_cut ? !(is_cancelled || is_late)
                   : fault == Fault::none && !same(*job, run_alone(of, other, wish)))
          ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  is_closed = true;
  scheduler->stop();
  closer.join();
  scheduler->stop();
  runner.join();
  scheduler.reset();
  for (const auto& job : left) CHECK(job->wait(dlm::Clock::duration{}));
  CHECK(wrong == 0 && failed_jobs > 0);
  CHECK(ended + static_cast<int>(left.size()) == 4 * requests_a_thread);
}

}  // namespace

// With the argument `all`, the tests with random numbers run more often.
int runner_test(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "requests") {  // so many seeds of random requests alone
    for (int seed = 0; seed < std::atoi(argv[2]); ++seed)
      test_random_requests(static_cast<uint32_t>(seed), seed % 2 == 0);
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
  }
  const bool all = argc > 1 && std::string(argv[1]) == "all";
  for (uint32_t seed = 0; seed < (all ? 60u : 20u); ++seed) test_random_requests(seed, true);
  for (uint32_t seed = 0; seed < (all ? 20u : 8u); ++seed) test_random_requests(seed, false);
  for (uint32_t seed = 0; seed < (all ? 40u : 20u); ++seed) test_costs(seed);
  for (uint32_t seed = 0; seed < (all ? 120u : 40u); ++seed) test_prefixes(seed);
  for (const bool reuses : {true, false})
    for (const char* const cache : {"prefix", "dual"})
      test_full_attention_reuses_prompts_if_asked(reuses, cache);
  test_damaged_prompt_caches();
  CHECK(all_hits > 100 && window_hits > 20);
  test_a_window_limits_the_cache();
  test_a_window_limits_reuse();
  test_guidance_and_a_window_limit_reuse();
  for (const int32_t window : {1, 17, 40})
    for (const int64_t most_idle : {1, 16, 48})
      test_a_window_with_few_idle_pages(window, most_idle);
  for (const int32_t shift : {0, 1}) test_a_second_request_reuses_its_prompt(shift);
  for (const int32_t shift : {0, 1}) {
    test_requests_at_once_share_their_prompt(shift);
    test_long_prompts_are_split(shift);
  }
  for (uint32_t seed = 0; seed < (all ? 1000u : 200u); ++seed) test_pages(seed);
  test_passes_are_shared();
  test_admission_by_cost();
  for (const bool shares : {true, false}) {
    test_failures_stay_with_their_requests(shares);
    for (const Fault fault : {Fault::needs, Fault::propose, Fault::end, Fault::end_foreign,
                              Fault::end_memory, Fault::step})
      test_faults_stay_with_their_requests(shares, fault);
    test_an_error_of_nobody_ends_all(shares);
    test_mixed_requests(shares, all ? 125 : 40);
  }
  test_faults_as_a_scheduler_is_destroyed();
  test_limits();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
