// The C ABI of schedulers and jobs. Any thread may submit a request. One thread of the program runs
// all requests.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "api/handles.h"
#include "cache/arena.h"
#include "decode/lockstep_passes.h"
#include "decode/runner.h"

struct dlm_scheduler {
  dlm_scheduler(dlm_bundle& bundle, std::unique_ptr<dlm::PassMaker> passes,
                const dlm::Runner::Options& options)
      : bundle(bundle),
        passes(std::move(passes)),
        runner(bundle.manifest.denoiser, *this->passes, options) {}

  dlm_bundle& bundle;
  const std::unique_ptr<dlm::PassMaker> passes;
  dlm::Runner runner;
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
  options.ended_fd = -1;
  options.prefix_cache_bytes = UINT64_MAX;
  return options;
}

void check_time(const char* name, double value) {
  if (!(value >= 0 && std::isfinite(value)))
    dlm::fail(DLM_INVALID_ARGUMENT, "%s = %g is not a time: set milliseconds", name, value);
}

// Returns the cost model for shared passes. If the engine cannot run shared passes, returns a model
// for which is_known() is false.
dlm::PassCost check_cost(const dlm_scheduler_options& options, const dlm::Engine& engine) {
  check_time("max_pass_ms", options.max_pass_ms);
  dlm::PassCost found;
  if (options.cost != nullptr) {
    const dlm_pass_cost cost = dlm::take(*options.cost, dlm_pass_cost{}, "dlm_pass_cost");
    check_time("cost.pass_ms", cost.pass_ms);
    check_time("cost.token_ms", cost.token_ms);
    check_time("cost.row_ms", cost.row_ms);
    check_time("cost.pair_ms", cost.pair_ms);
    found = {cost.pass_ms, cost.token_ms, cost.row_ms, cost.pair_ms};
  }
  if (options.max_pass_ms > 0 && !found.is_known())
    dlm::fail(DLM_INVALID_ARGUMENT,
              "max_pass_ms = %g needs this machine's cost of passes: set cost, which `dlm-export "
              "bench BUNDLE --cost` measures",
              options.max_pass_ms);
  if (engine.takes_segments()) return found;
  if (options.max_pass_ms > 0)
    dlm::fail(DLM_UNSUPPORTED,
              "max_pass_ms limits shared passes, but with this engine (%s) requests take "
              "turns: leave it out",
              engine.description().c_str());
  return {};
}

// Returns the number of cache rows to allocate for all running requests together. Both numbers are
// multiples of the page size.
dlm::RowCounts rows_for(const dlm_scheduler_options& options, const dlm::Denoiser& denoiser) {
  const int32_t page = dlm::page_rows(denoiser.visible_block),
                window = dlm::window_of(denoiser.cache);
  const uint64_t window_row = dlm::window_row_bytes(denoiser.cache),
                 row = dlm::row_bytes(denoiser.cache) - window_row;
  const auto longest = static_cast<uint64_t>(dlm::in_pages(denoiser.max_canvas_length, page));
  // The number of rows that a canvas needs in layers with a window, if the request has the
  // denoiser's block length.
  const auto window_canvas = static_cast<uint64_t>(dlm::window_rows(
      denoiser.max_canvas_length, window > 0 ? window + denoiser.draft_block : 0, page));
  // The number of canvases of a request. With guidance, a request has two canvases.
  const uint64_t canvases = denoiser.has_mask_token() ? 2 : 1;
  const uint64_t requests = static_cast<uint64_t>(options.max_running);
  // The largest number of cache rows that max_running requests can use.
  const uint64_t most = std::min<uint64_t>(2 * requests * longest, INT32_MAX);
  uint64_t bytes =
      options.cache_bytes > 0
          ? options.cache_bytes
          : std::max(kCacheBytes, longest * row + canvases * window_canvas * window_row);
  uint64_t rows = 0, window_rows = 0;
  // Raises `count` to at most `wanted` rows of `size` bytes, and to at most `part` of the bytes.
  const auto raise = [&](uint64_t& count, uint64_t wanted, uint64_t size, uint64_t part) {
    wanted = std::min(wanted, most);
    if (wanted <= count) return;
    const uint64_t more = std::min(wanted - count, part / size) / page * page;
    count += more;
    bytes -= more * size;
  };
  if (window > 0) {
    // If all layers had as many rows, each would have `equal` rows. Layers with a window never get
    // more.
    const uint64_t equal = bytes / (row + window_row);
    const auto raise_window = [&](uint64_t wanted, uint64_t part) {
      raise(window_rows, std::min(wanted, equal), window_row, part);
    };
    // One request with the denoiser's block length must fit first, and then one request with any
    // block length. The rest is for more requests. If requests reuse nothing, the layers with a
    // window need no rows of requests that have ended.
    raise_window(canvases * window_canvas, bytes);
    raise(rows, canvases * longest, row, bytes);
    raise_window(canvases * longest, bytes);
    raise_window(options.prefix_cache_bytes > 0 ? most : canvases * requests * window_canvas,
                 bytes / 2);
  }
  raise(rows, most, row, bytes);
  return {static_cast<int64_t>(rows), static_cast<int64_t>(window_rows)};
}

}  // namespace

void dlm_scheduler_options_init(dlm_scheduler_options* options, size_t struct_size) {
  dlm::give(default_scheduler_options(), struct_size, options);
}

dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                char* message, size_t message_capacity, dlm_scheduler** scheduler) {
  return dlm::make(scheduler, "scheduler", message, message_capacity, [&] {
    dlm::require(bundle, "bundle");
    dlm_scheduler_options chosen = default_scheduler_options();
    if (options != nullptr) chosen = dlm::take(*options, chosen, "dlm_scheduler_options");
    dlm::check_range("max_running", chosen.max_running, 1, dlm::kMostRequests);
    dlm::check_range("max_waiting", chosen.max_waiting, 1, kMostWaiting);
    dlm::check_range("max_tokens", chosen.max_tokens, 1, INT32_MAX);
    dlm::check_range("ended_fd", chosen.ended_fd, -1, INT32_MAX);
    const dlm::Denoiser& denoiser = bundle->manifest.denoiser;
    dlm::Engine& engine = *bundle->engine;
    const dlm::PassCost cost = check_cost(chosen, engine);
    const dlm::RowCounts rows = rows_for(chosen, denoiser);
    const uint64_t most_idle =
        std::min<uint64_t>(chosen.prefix_cache_bytes / dlm::row_bytes(denoiser.cache),
                           static_cast<uint64_t>(rows.full));
    std::unique_ptr<dlm::PassMaker> passes = dlm::make_shared_passes(
        denoiser, engine, rows, static_cast<int64_t>(most_idle), bundle->prompt_caches);
    if (passes == nullptr)
      passes = std::make_unique<dlm::LockstepPasses>(denoiser, engine, rows,
                                                     static_cast<size_t>(chosen.max_running));
    return new dlm_scheduler(*bundle, std::move(passes),
                             {chosen.max_running, chosen.max_waiting, chosen.max_tokens,
                              chosen.max_pass_ms, cost, chosen.ended_fd});
  });
}

void dlm_scheduler_destroy(dlm_scheduler* scheduler) { delete scheduler; }

dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler, const dlm_request* request, char* message,
                                size_t message_capacity, dlm_job** job) {
  return dlm::make(job, "job", message, message_capacity, [&] {
    dlm::require(scheduler, "scheduler");
    dlm::Wanted wanted = dlm::read_request(scheduler->bundle, request);
    return new dlm_job{
        scheduler->runner.submit(std::move(wanted.request), std::move(wanted.options))};
  });
}

dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                             dlm_before_pass_fn before_pass, void* user, char* message,
                             size_t message_capacity) {
  return dlm::guarded(message, message_capacity, [&] {
    dlm::require(scheduler, "scheduler");
    scheduler->runner.run(until_idle != 0 ? dlm::Runner::Until::idle : dlm::Runner::Until::stopped,
                          [&] { return before_pass == nullptr || before_pass(user) == 0; });
  });
}

void dlm_scheduler_stop(dlm_scheduler* scheduler) {
  if (scheduler != nullptr) scheduler->runner.stop();
}

void dlm_scheduler_get_stats(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                             size_t struct_size) {
  dlm::give(scheduler == nullptr ? dlm_scheduler_stats{} : scheduler->runner.stats(), struct_size,
            stats);
}

int32_t dlm_job_wait(const dlm_job* job, double timeout_ms) {
  if (job == nullptr) return 0;
  if (timeout_ms < 0) return job->job->wait({}) ? 1 : 0;
  // A NaN timeout counts as 0.
  const double time_ms = timeout_ms > 0 ? std::min(timeout_ms, dlm::kLongestMs) : 0;
  return job->job->wait(dlm::from_ms(time_ms)) ? 1 : 0;
}

dlm_status dlm_job_result(const dlm_job* job, const dlm_result** result) {
  if (result != nullptr) *result = nullptr;
  if (dlm_job_wait(job, 0) == 0) return DLM_INVALID_ARGUMENT;
  if (result != nullptr) *result = &job->job->result();
  return job->job->result().status;
}

void dlm_job_destroy(dlm_job* job) {
  dlm_job_cancel(job);
  delete job;
}
