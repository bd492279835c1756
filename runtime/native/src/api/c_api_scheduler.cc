// The part of the C ABI in which requests share a scheduler.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "api/c_api.h"
#include "decode/scheduler.h"

struct dlm_scheduler {
  dlm_bundle& bundle;
  dlm::Scheduler scheduler;
};

struct dlm_job {
  std::shared_ptr<dlm::Job> job;
};

template <>
struct dlm::Sized<dlm_scheduler_options> {
  static constexpr char name[] = "dlm_scheduler_options";
  static constexpr std::array sizes = {DLM_SIZE_UP_TO(dlm_scheduler_options, cache_bytes),
                                       DLM_SIZE_UP_TO(dlm_scheduler_options, cost)};
};

namespace {

constexpr uint64_t kCacheBytes = uint64_t{1} << 30;
constexpr int32_t kMostWaiting = 1 << 20;

dlm_scheduler_options default_scheduler_options() {
  dlm_scheduler_options options{};
  options.struct_size = sizeof options;
  options.max_running = 16;
  options.max_waiting = 1024;
  options.max_tokens = 512;
  return options;
}

void check_range(const char* name, int32_t value, int32_t lowest, int32_t highest) {
  if (value < lowest || value > highest)
    dlm::fail(DLM_INVALID_ARGUMENT, "%s = %d is outside %d..%d", name, value, lowest, highest);
}

void check_time(const char* name, double value) {
  if (!(value >= 0 && std::isfinite(value)))
    dlm::fail(DLM_INVALID_ARGUMENT, "%s = %g is no time: give milliseconds", name, value);
}

dlm::PassCost check_cost(const dlm_scheduler_options& options, const dlm::Engine& engine) {
  const dlm_pass_cost& cost = options.cost;
  check_time("max_pass_ms", options.max_pass_ms);
  check_time("cost.pass_ms", cost.pass_ms);
  check_time("cost.token_ms", cost.token_ms);
  check_time("cost.row_ms", cost.row_ms);
  check_time("cost.pair_ms", cost.pair_ms);
  const dlm::PassCost found{cost.pass_ms, cost.token_ms, cost.row_ms, cost.pair_ms};
  if (options.max_pass_ms > 0 && !found.is_known())
    dlm::fail(DLM_INVALID_ARGUMENT,
              "max_pass_ms = %g wants to know what passes cost here: give cost, which `dlm-export "
              "bench BUNDLE --cost` measures",
              options.max_pass_ms);
  if (options.max_pass_ms > 0 && !engine.takes_segments())
    dlm::fail(DLM_UNSUPPORTED,
              "max_pass_ms bounds passes that requests share, and with this engine (%s) they take "
              "turns: leave it out",
              engine.description().c_str());
  return found;
}

dlm::Scheduler::Options check(const dlm_scheduler_options& options, const dlm::Denoiser& denoiser,
                              const dlm::Engine& engine) {
  check_range("max_running", options.max_running, 1, dlm::kMostRequests);
  check_range("max_waiting", options.max_waiting, 1, kMostWaiting);
  check_range("max_tokens", options.max_tokens, 1, INT32_MAX);
  uint64_t row = 0;
  for (const dlm::CacheLayer& layer : denoiser.cache) row += 2 * layer.tensor_bytes(1, 1);
  const auto longest = static_cast<uint64_t>(denoiser.max_canvas_length);
  // No more than all that run can have, guided ones twice.
  const uint64_t most =
      std::min<uint64_t>(2 * longest * static_cast<uint64_t>(options.max_running), INT32_MAX);
  const uint64_t wanted =
      options.cache_bytes > 0 ? options.cache_bytes / row : std::max(kCacheBytes / row, longest);
  return {options.max_running, options.max_waiting,
          options.max_tokens,  static_cast<int64_t>(std::min(wanted, most)),
          options.max_pass_ms, check_cost(options, engine)};
}

}  // namespace

void dlm_scheduler_options_init_sized(dlm_scheduler_options* options, size_t struct_size) {
  dlm::give(default_scheduler_options(), struct_size, options);
}

dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                char* message, size_t message_capacity, dlm_scheduler** scheduler) {
  if (scheduler != nullptr) *scheduler = nullptr;
  return dlm::guarded(message, message_capacity, [&] {
    dlm::require(scheduler, "scheduler");
    dlm::require(bundle, "bundle");
    const dlm_scheduler_options defaults = default_scheduler_options();
    const dlm::Denoiser& denoiser = bundle->manifest.denoiser;
    dlm::Engine& engine = *bundle->engine;
    const dlm::Scheduler::Options chosen =
        check(options == nullptr ? defaults : dlm::take(*options, defaults), denoiser, engine);
    *scheduler = new dlm_scheduler{*bundle, {denoiser, engine, chosen}};
  });
}

void dlm_scheduler_destroy(dlm_scheduler* scheduler) { delete scheduler; }

dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler, const dlm_generate_options* options,
                                const dlm_automaton* automaton, int32_t given,
                                const int32_t* tokens, size_t count, char* message,
                                size_t message_capacity, dlm_job** job) {
  if (job != nullptr) *job = nullptr;
  return dlm::guarded(message, message_capacity, [&] {
    dlm::require(job, "job");
    dlm::require(scheduler, "scheduler");
    const dlm_bundle& bundle = scheduler->bundle;
    const dlm_generate_options chosen = dlm::take_options(bundle, options);
    if (chosen.policies != nullptr)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "policies must be NULL: a request that is handed in has one policy");
    dlm::Limits limits{chosen.max_steps, {}, chosen.on_step, chosen.user};
    if (chosen.deadline_ms > 0) limits.deadline = dlm::deadline_of(chosen);
    const dlm::Policy policy = dlm::choose_policy(bundle, chosen.policy);
    auto handle = std::make_unique<dlm_job>();
    const dlm::Constraint constraint = dlm::constraint_of(automaton, given);
    handle->job = scheduler->scheduler.submit(
        dlm::make_request(bundle, constraint, policy, chosen, tokens, count, ""), limits);
    *job = handle.release();
  });
}

dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                             dlm_before_pass_fn before_pass, void* user, char* message,
                             size_t message_capacity) {
  return dlm::guarded(message, message_capacity, [&] {
    dlm::require(scheduler, "scheduler");
    scheduler->scheduler.run(until_idle != 0,
                             [&] { return before_pass == nullptr || before_pass(user) == 0; });
  });
}

void dlm_scheduler_stop(dlm_scheduler* scheduler) {
  if (scheduler != nullptr) scheduler->scheduler.stop();
}

void dlm_scheduler_stats_sized(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                               size_t struct_size) {
  dlm::give(scheduler == nullptr ? dlm_scheduler_stats{} : scheduler->scheduler.told(), struct_size,
            stats);
}

int32_t dlm_job_wait(const dlm_job* job, double timeout_ms) {
  if (job == nullptr) return 0;
  if (timeout_ms < 0) return job->job->wait({}) ? 1 : 0;
  const std::chrono::duration<double, std::milli> time(
      timeout_ms > 0 ? std::min(timeout_ms, dlm::kLongest) : 0);  // 0 for NaN too
  return job->job->wait(std::chrono::duration_cast<dlm::Clock::duration>(time)) ? 1 : 0;
}

const int32_t* dlm_job_tokens(const dlm_job* job, size_t* length) {
  const bool is_done = dlm_job_wait(job, 0) != 0;
  if (length != nullptr) *length = is_done ? job->job->canvas().size() : 0;
  return is_done ? job->job->canvas().data() : nullptr;
}

dlm_status dlm_job_result_sized(const dlm_job* job, dlm_result* result, size_t struct_size) {
  dlm::give(dlm_result{}, struct_size, result);
  if (dlm_job_wait(job, 0) == 0) return DLM_INVALID_ARGUMENT;
  dlm::give(dlm::result_of(job->job->outcome()), struct_size, result);
  return job->job->status();
}

const char* dlm_job_message(const dlm_job* job) {
  return dlm_job_wait(job, 0) == 0 ? "" : job->job->message().c_str();
}

void dlm_job_cancel(dlm_job* job) {
  if (job != nullptr) job->job->cancel();
}

void dlm_job_destroy(dlm_job* job) {
  dlm_job_cancel(job);
  delete job;
}
