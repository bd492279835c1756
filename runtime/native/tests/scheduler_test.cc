// Requests that share passes, and those that take turns, come to what each comes to alone: over a
// made-up denoiser whose predictions depend on every row that is seen, and on nothing else. Random
// requests join, leave, are cancelled and fail, from several threads.
//
// Compiled together with the core's sources, as its classes are hidden in the library. Prints "N
// passed, N failed".
#include "decode/scheduler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
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
#include "decode/loop.h"
#include "decode/proposer.h"

namespace {

int passed = 0, failed = 0;

void note(bool holds, int line, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("scheduler_test.cc:%d: failed: %s\n", line, what.c_str());
}
#define CHECK(condition) note((condition), __LINE__, #condition)

constexpr int32_t kVocabulary = 13, kMask = 0, kEnd = 1;

uint64_t mix(uint64_t x) {  // SplitMix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A row of every head of every layer is a token and its position. A prediction follows from the sum
// over all rows that are seen.
class Summing final : public dlm::HostEngine {
 public:
  Summing(dlm::CacheShape cache, int64_t visible_block, bool takes_segments)
      : HostEngine(std::move(cache)),
        visible_block_(visible_block),
        takes_segments_(takes_segments) {}

  bool takes_segments() const override { return takes_segments_; }
  std::string description() const override { return "made up"; }
  void fail_after(int passes) { fails_after_ = passes; }
  int64_t most_requests() const { return most_requests_; }
  // What its passes cost by this: together, and the costliest one that several requests shared.
  void count_by(const dlm::PassCost& cost) { cost_ = cost; }
  double cost() const { return spent_; }
  void take(std::chrono::microseconds time) { time_ = time; }  // a pass, at least
  double costliest_shared() const { return costliest_shared_; }

  void run(const dlm_pass& pass, const std::vector<dlm::Segment>& segments) override {
    if (fails_after_ >= 0 && fails_after_-- == 0) dlm::fail(DLM_ENGINE_FAILED, "made to fail");
    std::vector<dlm::Segment> parts = segments;
    if (parts.empty())
      for (int64_t b = 0; b < pass.batch; ++b) parts.push_back({0, pass.cached, 0, pass.tokens});
    most_requests_ = std::max<int64_t>(most_requests_, static_cast<int64_t>(parts.size()));
    count(pass, parts);
    std::this_thread::sleep_for(time_);
    for (size_t number = 0; number < parts.size(); ++number) {
      const int64_t b = segments.empty() ? static_cast<int64_t>(number) : 0;
      keep(pass, b, parts[number]);
      score(pass, b, parts[number]);
    }
  }

 private:
  void count(const dlm_pass& pass, const std::vector<dlm::Segment>& parts) {
    dlm::PassLoad load{0, static_cast<double>(pass.rows), 0};
    for (const dlm::Segment& part : parts) {
      load.tokens += static_cast<double>(part.tokens);
      load.pairs += static_cast<double>(part.tokens * (part.tokens + part.cached));
    }
    const double cost = cost_.of(load);
    spent_ += cost;
    if (parts.size() > 1) costliest_shared_ = std::max(costliest_shared_, cost);
  }

  static uint64_t value_of(int64_t token, int64_t position) {
    return mix(static_cast<uint64_t>(token) * 100003 + static_cast<uint64_t>(position));
  }

  void keep(const dlm_pass& pass, int64_t b, const dlm::Segment& part) const {
    if (pass.present_keys == nullptr) return;
    for (size_t layer = 0; layer < cache().size(); ++layer)
      for (int32_t head = 0; head < cache()[layer].kv_heads; ++head)
        for (int64_t t = part.first; t < part.first + part.tokens; ++t) {
          const float row[2] = {static_cast<float>(pass.input_ids[b * pass.tokens + t]),
                                static_cast<float>(pass.position_ids[b * pass.tokens + t])};
          const int64_t at = ((b * cache()[layer].kv_heads + head) * pass.tokens + t) * 2;
          std::memcpy(static_cast<float*>(pass.present_keys[layer]) + at, row, sizeof row);
          std::memcpy(static_cast<float*>(pass.present_values[layer]) + at, row, sizeof row);
        }
  }

  // What is cached, by each head of each layer; they have to agree.
  uint64_t cached_sum(const dlm_pass& pass, int64_t b, const dlm::Segment& part) const {
    uint64_t found = 0;
    if (part.cached == 0) return found;
    for (size_t layer = 0; layer < cache().size(); ++layer)
      for (const void* const* const tensors : {pass.past_keys, pass.past_values})
        for (int32_t head = 0; head < cache()[layer].kv_heads; ++head) {
          uint64_t sum = 0;
          const auto* const rows =
              static_cast<const float*>(tensors[layer]) +
              ((b * cache()[layer].kv_heads + head) * pass.cached + part.start) * 2;
          for (int64_t i = 0; i < part.cached; ++i)
            sum +=
                value_of(static_cast<int64_t>(rows[2 * i]), static_cast<int64_t>(rows[2 * i + 1]));
          if (found != 0 && found != sum) dlm::fail(DLM_INTERNAL, "heads that see other rows");
          found = sum;
        }
    return found;
  }

  void score(const dlm_pass& pass, int64_t b, const dlm::Segment& part) const {
    const int64_t* const ids = pass.input_ids + b * pass.tokens;
    const int64_t* const positions = pass.position_ids + b * pass.tokens;
    const uint64_t cached = cached_sum(pass, b, part);
    for (int64_t r = 0; r < pass.rows; ++r) {
      const int64_t row = b * pass.rows + r, query = pass.score_rows[row];
      if (query < part.first || query >= part.first + part.tokens) continue;
      uint64_t sum = cached;
      for (int64_t t = part.first; t < part.first + part.tokens; ++t)
        if (visible_block_ == 0 ||
            positions[t] / visible_block_ <= positions[query] / visible_block_)
          sum += value_of(ids[t], positions[t]);
      predict(pass, row, mix(sum ^ static_cast<uint64_t>(positions[query])));
    }
  }

  static void predict(const dlm_pass& pass, int64_t row, uint64_t seed) {
    double logits[kVocabulary], total = 0;
    int32_t order[kVocabulary];
    for (int32_t v = 0; v < kVocabulary; ++v) {
      // An end token is rare, so that requests go on for a while.
      logits[v] = static_cast<double>(mix(seed + static_cast<uint64_t>(v)) % 9000) / 1000 -
                  (v == kEnd ? 4 : 0);
      total += v == kMask ? 0 : std::exp(logits[v]);
      order[v] = v;
      if (pass.logits != nullptr)
        pass.logits[row * kVocabulary + v] = static_cast<float>(logits[v]);
    }
    std::stable_sort(order, order + kVocabulary, [&](int32_t one, int32_t other) {
      return (one == kMask ? -1e9 : logits[one]) > (other == kMask ? -1e9 : logits[other]);
    });
    double entropy = 0;
    for (int32_t v = 1; v < kVocabulary; ++v)
      entropy += std::exp(logits[v]) / total * (logits[v] - std::log(total));
    for (int k = 0; k < 2; ++k) {
      pass.top_tokens[2 * row + k] = order[k];
      pass.top_probs[2 * row + k] = static_cast<float>(std::exp(logits[order[k]]) / total);
    }
    if (pass.entropy != nullptr) pass.entropy[row] = static_cast<float>(entropy);
  }

  const int64_t visible_block_;
  const bool takes_segments_;
  int fails_after_ = -1;
  int64_t most_requests_ = 0;
  dlm::PassCost cost_{};
  double spent_ = 0, costliest_shared_ = 0;
  std::chrono::microseconds time_{0};
};

dlm::CacheShape shape() { return {{2, 2, 4}, {1, 2, 4}}; }

dlm::Denoiser denoiser(int32_t visible_block, int32_t shift) {
  return {kVocabulary, kMask, 96, 2, shift, true, shape(), {kEnd}, visible_block};
}

// Where a request fails.
enum class Fault { none, needs, propose, end, end_foreign, end_memory, step };

struct NotAnException {};

// The policy's own proposer. One of its calls throws.
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
  void limit(const dlm::Turn& turn, const dlm::Proposals& proposals,
             std::vector<int32_t>& chosen) const override {
    own_->limit(turn, proposals, chosen);
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

// A request, to be made as often as it is wanted.
struct Wish {
  dlm::Policy policy;
  std::vector<int32_t> canvas;
  dlm::Limits limits;

  dlm::Request make(const dlm::Denoiser& of, const dlm::Engine& engine,
                    Fault fault = Fault::none) const {
    std::vector<uint8_t> undecided;
    for (const int32_t token : canvas) undecided.push_back(token == kMask);
    auto proposer = fault == Fault::none ? nullptr : std::make_unique<Faulty>(of, policy, fault);
    return dlm::Request(of, engine, policy, canvas, undecided, 0, "", std::move(proposer));
  }
};

template <class Of>
auto any_of(std::mt19937& random, const std::vector<Of>& values) {
  return values[random() % values.size()];
}

Wish make_wish(std::mt19937& random, int32_t visible_block, int32_t shift) {
  dlm_policy policy = dlm::default_policy();
  policy.commit =
      any_of<const char*>(random, {"static", "threshold", "dynamic", "factor", "sequential"});
  policy.score = any_of<const char*>(random, {"confidence", "margin", "random"});
  policy.threshold = any_of<double>(random, {0.3, 0.6, 0.9});
  policy.seed = random();
  if (visible_block > 0) {
    policy.cache = any_of<const char*>(random, {"none", "block", "block", "block-dual"});
    policy.block_length = 0;
    policy.sub_block_length = any_of<int32_t>(random, {0, visible_block / 2});
    if (shift == 0 && std::string(policy.cache) == "block" && random() % 3 == 0)
      policy.remask = "edit";
    if (shift == 0 && std::string(policy.cache) == "block")
      policy.store = any_of<const char*>(random, {"pass", "open", "reuse"});
  } else {
    policy.cache = any_of<const char*>(random, {"none", "prefix", "dual", "dual"});
    policy.block_length = any_of<int32_t>(random, {0, 4, 7});
    if (std::string(policy.cache) != "none") policy.refresh = any_of<int32_t>(random, {0, 0, 5});
  }
  if (random() % 4 == 0) policy.select = "sample", policy.temperature = 0.8;
  if (random() % 4 == 0) policy.cfg_scale = 0.7;
  Wish wish{dlm::check_policy(policy), {}, {}};
  const size_t given = 1 + random() % 30, wanted = 1 + random() % 40;
  for (size_t i = 0; i < given + wanted; ++i)
    wish.canvas.push_back(i < given && random() % 12 != 0
                              ? static_cast<int32_t>(2 + random() % (kVocabulary - 2))
                              : kMask);
  if (random() % 5 == 0) wish.limits.max_steps = static_cast<int32_t>(1 + random() % 6);
  return wish;
}

struct Alone {
  std::vector<int32_t> canvas;
  dlm::Outcome outcome;
};

// What the request comes to by itself, over the context that a session has.
Alone run_alone(const dlm::Denoiser& of, Summing& engine, const Wish& wish) {
  const auto context = engine.open_context(of.max_canvas_length);
  dlm::Buffers buffers;
  std::vector<dlm::Request> one;
  one.push_back(wish.make(of, engine));
  dlm::Batch batch(of, std::move(one));
  while (!batch.done()) {
    if (wish.limits.max_steps > 0 && batch.requests()[0].nfe() >= wish.limits.max_steps)
      batch.end(0, dlm::Finish::steps);
    else
      batch.step(*context, buffers);
  }
  return {batch.requests()[0].canvas(), batch.requests()[0].outcome()};
}

bool same(const dlm::Job& job, const Alone& alone) {
  const dlm::Outcome &one = job.outcome(), &other = alone.outcome;
  const auto equal = [](float a, float b) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
  };
  return job.status() == DLM_OK && job.canvas() == alone.canvas && one.finish == other.finish &&
         one.nfe == other.nfe && one.undecided == other.undecided &&
         one.completion_tokens == other.completion_tokens &&
         std::equal(one.log_probs.begin(), one.log_probs.end(), other.log_probs.begin(),
                    other.log_probs.end(), equal);
}

const std::function<bool()> kNothing = [] { return true; };

void test_random_requests(uint32_t seed, bool shares) {
  std::mt19937 random(seed);
  const int32_t visible_block = any_of<int32_t>(random, {0, 4, 8}),
                shift = static_cast<int32_t>(random() % 2);
  const dlm::Denoiser of = denoiser(visible_block, shift);
  Summing engine(shape(), visible_block, shares), other(shape(), visible_block, false);
  const int64_t rows = 150 + static_cast<int64_t>(random() % 300);
  dlm::Scheduler scheduler(of, engine,
                           {static_cast<int32_t>(1 + random() % 9), 100,
                            static_cast<int32_t>(8 + random() % 200), rows});
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  const auto submit = [&] {
    wishes.push_back(make_wish(random, visible_block, shift));
    jobs.push_back(scheduler.submit(wishes.back().make(of, engine), wishes.back().limits));
  };
  for (int i = 0; i < 4; ++i) submit();
  scheduler.run(true, [&] {
    if (jobs.size() < 16 && random() % 3 == 0) submit();  // joins while others run
    return true;
  });
  for (size_t i = 0; i < jobs.size(); ++i)
    CHECK(jobs[i]->wait(dlm::Clock::duration{}) && same(*jobs[i], run_alone(of, other, wishes[i])));
  const dlm_scheduler_stats stats = scheduler.told();
  CHECK(stats.waiting == 0 && stats.running == 0 &&
        stats.finished == static_cast<int64_t>(jobs.size()) && stats.refused == 0);
  CHECK(stats.shares >= stats.passes && (shares || stats.shares == stats.passes));
}

void test_passes_are_shared() {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  dlm::Scheduler scheduler(of, engine, {8, 100, 1 << 20, 2000});
  dlm_policy policy = dlm::default_policy();
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (size_t i = 0; i < 8; ++i) {
    Wish wish{dlm::check_policy(policy), std::vector<int32_t>(5 + i, 2), {}};
    wish.canvas.resize(wish.canvas.size() + 8, kMask);
    jobs.push_back(scheduler.submit(wish.make(of, engine), {}));
  }
  scheduler.run(true, kNothing);
  CHECK(engine.most_requests() == 8);
  CHECK(scheduler.told().passes == 8);  // one token each of eight, all in the same passes
}

// Passes that requests share are expected to stay within a time, by what they cost; those that
// cannot wait for a pass of their own.
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
  dlm::Scheduler scheduler(of, engine, {9, 100, 1 << 20, 1000, most_ms, cost});
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int i = 0; i < 12; ++i) {
    wishes.push_back(make_wish(random, visible_block, shift));
    wishes.back().policy.cfg_scale = 0;  // so that a request is one segment
    jobs.push_back(scheduler.submit(wishes.back().make(of, engine), wishes.back().limits));
  }
  scheduler.run(true, kNothing);
  CHECK(engine.costliest_shared() <= most_ms);
  for (size_t i = 0; i < jobs.size(); ++i) CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
  // A pass that only stores scores a row all the same, which no request counts.
  const double expected = 1000 * scheduler.told().expected_s;
  CHECK(expected <= engine.cost() * (1 + 1e-9));
  CHECK(expected >= engine.cost() - cost.row * static_cast<double>(scheduler.told().passes) - 1e-6);
}

// No more requests begin than a pass within the time has room for, and one does whatever it takes.
void test_admission_by_cost() {
  const dlm::Denoiser of = denoiser(0, 0);
  Summing engine(shape(), 0, true);
  dlm_policy policy = dlm::default_policy();
  policy.cache = "dual";
  policy.block_length = 4;
  const Wish wish{dlm::check_policy(policy), std::vector<int32_t>(8, kMask), {}};
  int64_t passes = 0;
  const auto most_running = [&](double most_ms, double token_ms = 1) {
    dlm::Scheduler scheduler(of, engine,
                             {8, 100, 1 << 20, 2000, most_ms, {token_ms, token_ms, 0, 0}});
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
  CHECK(most_running(13) == 3);  // four tokens of a block each, and one millisecond
  CHECK(most_running(12.9) == 2);
  CHECK(most_running(0.1) == 1);
  // Passes that take several times as long as their cost says are of fewer requests before long.
  CHECK(most_running(130, 10) == 3);
  const int64_t before = passes;
  engine.take(std::chrono::milliseconds(4));
  CHECK(most_running(1.3, 0.1) == 3);
  CHECK(passes > before);
}

// A pass that fails fails those that took part in it, with its sentence, and nobody else.
void test_failures_stay_with_their_requests(bool shares) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(5);
  dlm::Scheduler scheduler(of, engine, {2, 100, 1 << 20, 1000});
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
    if (jobs[i]->status() == DLM_OK) {
      CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
      continue;
    }
    ++failures;
    CHECK(jobs[i]->status() == DLM_ENGINE_FAILED && jobs[i]->message() == "made to fail");
  }
  CHECK(failures >= 1 && failures <= 2);
}

// A request that fails as it ends, or anywhere else, fails alone: every wait ends, and the other
// results do not change.
void test_faults_stay_with_their_requests(bool shares, Fault fault) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(7);
  std::shared_ptr<dlm::Job> faulty[3];
  std::vector<Wish> wishes;
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  const auto throws = [](void*, const dlm_step*) -> int32_t { throw NotAnException{}; };
  {
    dlm::Scheduler scheduler(of, engine, {4, 100, 1 << 20, 1000});
    const auto submit_faulty = [&](dlm::Limits limits) {
      if (fault == Fault::step) limits.on_step = throws;
      Wish wish = make_wish(random, 4, 0);
      wish.policy.cfg_scale = 0;  // guidance asks its proposer for no needs
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
    if (i < 2 && !fails_in_end)
      CHECK(job.status() == DLM_OK &&
            job.outcome().finish == (i == 0 ? dlm::Finish::cancelled : dlm::Finish::deadline));
    else
      CHECK(job.status() == wanted && !job.message().empty());
    CHECK(job.canvas().size() == 20);
  }
  for (size_t i = 0; i < jobs.size(); ++i) CHECK(same(*jobs[i], run_alone(of, other, wishes[i])));
}

// One that is not done as its scheduler goes, and fails as it ends then.
void test_faults_as_a_scheduler_is_destroyed() {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, true);
  std::mt19937 random(8);
  std::shared_ptr<dlm::Job> job;
  {
    dlm::Scheduler scheduler(of, engine, {4, 100, 1 << 20, 1000});
    Wish wish = make_wish(random, 4, 0);
    job = scheduler.submit(wish.make(of, engine, Fault::end), {});
  }
  CHECK(job->wait({}) && job->status() == DLM_BAD_BUNDLE && job->message() == "made to fail");
}

// When making passes itself fails, all that run and wait end with the cause; then submit() throws
// it, until the next run.
void test_an_error_of_nobody_ends_all(bool shares) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares), other(shape(), 4, false);
  std::mt19937 random(9);
  dlm::Scheduler scheduler(of, engine, {2, 100, 1 << 20, 1000});
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
    CHECK(job->status() == DLM_ENGINE_FAILED && job->message() == "no engine any more");
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
  dlm::Scheduler scheduler(of, engine, {1, 2, 64, 30});
  dlm_policy policy = dlm::default_policy();
  policy.cache = "dual";
  policy.block_length = 4;
  const auto wish = [&](size_t length, dlm::Limits limits) {
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
  CHECK(status_of(wish(31, {})) == DLM_INVALID_ARGUMENT);  // more rows than there are
  const auto first = submit(wish(30, {})),
             second = submit(wish(8, {0, dlm::Clock::now(), nullptr, nullptr}));
  CHECK(status_of(wish(8, {})) == DLM_BUSY);
  CHECK(scheduler.told().refused == 1 && scheduler.told().waiting == 2);
  CHECK(!first->wait(std::chrono::milliseconds(1)));
  second->cancel();
  scheduler.run(true, kNothing);
  CHECK(first->outcome().finish == dlm::Finish::length ||
        first->outcome().finish == dlm::Finish::stop);
  CHECK(second->outcome().finish == dlm::Finish::cancelled && second->outcome().nfe == 0);
  CHECK(second->canvas() == std::vector<int32_t>(8, kEnd));
  const auto late = submit(wish(8, {0, dlm::Clock::now(), nullptr, nullptr}));
  scheduler.run(true, kNothing);
  CHECK(late->outcome().finish == dlm::Finish::deadline && late->outcome().nfe == 0);
  // A step callback that stops, and one that sees every step.
  int steps = 0;
  const auto count = [](void* user, const dlm_step* step) {
    return ++*static_cast<int*>(user) == 3 || step->nfe < 0 ? 1 : 0;
  };
  const auto stopped = submit(wish(20, {0, {}, count, &steps}));
  scheduler.run(true, kNothing);
  CHECK(stopped->status() == DLM_CANCELLED && steps == 3);
  // When before_pass asks to stop, requests stay as they are, and the next run goes on.
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
  CHECK(kept->status() == DLM_OK && kept->wait(dlm::Clock::duration{}));
  // One that is abandoned with its scheduler ends cancelled.
  std::shared_ptr<dlm::Job> abandoned;
  {
    dlm::Scheduler short_lived(of, engine, {1, 2, 64, 30});
    abandoned = short_lived.submit(wish(8, {}).make(of, engine), {});
  }
  CHECK(abandoned->wait({}) && abandoned->outcome().finish == dlm::Finish::cancelled);
}

// Many threads hand in and cancel, one runs; what was neither cancelled nor stopped is what it is
// alone.
void test_threads(bool shares, int requests_a_thread) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares);
  dlm::Scheduler scheduler(of, engine, {6, 1000, 128, 400});
  std::thread runner([&] { scheduler.run(false, kNothing); });
  std::atomic<int> wrong{0}, ended{0};
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      std::mt19937 random(number);
      Summing other(shape(), 4, false);
      for (int i = 0; i < requests_a_thread; ++i) {
        Wish wish = make_wish(random, 4, 0);
        const bool is_late = random() % 6 == 0, is_cancelled = random() % 4 == 0;
        dlm::Limits limits = wish.limits;
        if (is_late)
          limits.deadline = dlm::Clock::now() + std::chrono::microseconds(random() % 2000);
        const auto job = scheduler.submit(wish.make(of, engine), limits);
        if (is_cancelled) job->cancel();
        job->wait({});
        ++ended;
        const auto finish = job->outcome().finish;
        const bool is_cut = finish == dlm::Finish::cancelled || finish == dlm::Finish::deadline;
        if (is_cut ? !(is_cancelled || is_late) : !same(*job, run_alone(of, other, wish))) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  scheduler.stop();
  runner.join();
  CHECK(wrong == 0 && ended == 4 * requests_a_thread);
  CHECK(scheduler.told().finished == 4 * requests_a_thread);
}

// Four threads hand in requests of every kind, some of which fail wherever one can, while the
// thread that makes passes is stopped and started again and then destroyed with requests in it.
// Every wait ends, and the results of the other requests do not change.
void test_mixed_requests(bool shares, int requests_a_thread) {
  const dlm::Denoiser of = denoiser(4, 0);
  Summing engine(shape(), 4, shares);
  std::optional<dlm::Scheduler> scheduler(std::in_place, of, engine,
                                          dlm::Scheduler::Options{6, 1000, 128, 400});
  std::atomic<bool> is_closed{false};
  std::atomic<int> wrong{0}, ended{0}, failed_jobs{0};
  std::thread runner([&] {
    for (int runs = 0; !is_closed; ++runs) {  // stop() may come before, while and after it runs
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
        dlm::Limits limits = wish.limits;
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
        if (job->status() != DLM_OK) {
          ++failed_jobs;
          if (fault == Fault::none) ++wrong;
          continue;
        }
        const auto finish = job->outcome().finish;
        const bool is_cut = finish == dlm::Finish::cancelled || finish == dlm::Finish::deadline;
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

int main() {
  for (uint32_t seed = 0; seed < 60; ++seed) test_random_requests(seed, true);
  for (uint32_t seed = 0; seed < 20; ++seed) test_random_requests(seed, false);
  for (uint32_t seed = 0; seed < 40; ++seed) test_costs(seed);
  test_passes_are_shared();
  test_admission_by_cost();
  for (const bool shares : {true, false}) {
    test_failures_stay_with_their_requests(shares);
    test_threads(shares, 250);
    for (const Fault fault : {Fault::needs, Fault::propose, Fault::end, Fault::end_foreign,
                              Fault::end_memory, Fault::step})
      test_faults_stay_with_their_requests(shares, fault);
    test_an_error_of_nobody_ends_all(shares);
    test_mixed_requests(shares, 125);
  }
  test_faults_as_a_scheduler_is_destroyed();
  test_limits();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
