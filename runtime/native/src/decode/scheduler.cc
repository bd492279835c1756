#include "decode/scheduler.h"

#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <utility>

#include "base/one_line.h"

namespace dlm {
namespace {

int64_t rows_needed(const Request& request) {
  const std::vector<int32_t> rows = Member::rows_of(request);
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

}  // namespace

int64_t most_rows(const std::vector<Request>& requests, size_t most) {
  std::vector<int64_t> rows;
  for (const Request& request : requests) rows.push_back(rows_needed(request));
  std::sort(rows.rbegin(), rows.rend());
  rows.resize(std::min(rows.size(), most));
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

Job::Job(std::shared_ptr<Board> board, Request request, const Limits& limits)
    : board_(std::move(board)), limits_(limits), request_(std::move(request)) {}

bool Job::wait(std::optional<Clock::duration> time) const {
  std::unique_lock<std::mutex> lock(board_->mutex);
  const auto is_done = [&] { return is_done_; };
  if (time) return board_->changed.wait_for(lock, *time, is_done);
  board_->changed.wait(lock, is_done);
  return true;
}

Scheduler::Scheduler(const Denoiser& denoiser, Engine& engine, const Options& options)
    : denoiser_(denoiser),
      engine_(engine),
      options_(options),
      arena_(engine.open_arena(options.rows)) {}

Scheduler::~Scheduler() {
  for (Jobs* const jobs : {&waiting_, &running_}) {
    for (const std::shared_ptr<Job>& job : *jobs) {
      end(*job, Finish::cancelled);
      finish(*job);
    }
  }
}

std::shared_ptr<Job> Scheduler::submit(Request request, const Limits& limits) {
  const int64_t rows = rows_needed(request);
  if (rows > options_.rows)
    fail(DLM_INVALID_ARGUMENT,
         "this request keeps the keys and values of %lld tokens, and the scheduler has room for "
         "%lld: give it more cache_bytes, "
         "or choose a shorter canvas or cache = \"none\"",
         static_cast<long long>(rows), static_cast<long long>(options_.rows));
  const auto job = std::make_shared<Job>(board_, std::move(request), limits);
  job->usual_ms_ = options_.cost.share(job->request().usual_load(options_.cost));
  const std::lock_guard<std::mutex> lock(board_->mutex);
  if (failure_)
    throw Error(
        failure_->status,
        "the scheduler takes no more requests, as making passes failed: " + failure_->message);
  if (waiting_.size() >= static_cast<size_t>(options_.most_waiting)) {
    ++told_.refused;
    fail(DLM_BUSY, "%zu requests wait already, as many as may: hand this one in again later",
         waiting_.size());
  }
  waiting_.push_back(job);
  ++told_.submitted;
  board_->changed.notify_all();
  return job;
}

void Scheduler::run(bool until_idle, const std::function<bool()>& before_pass) {
  std::unique_lock<std::mutex> lock(board_->mutex);
  if (is_running_)
    fail(DLM_INVALID_ARGUMENT, "the scheduler is being run already: one thread makes the passes");
  struct Running {
    std::unique_lock<std::mutex>& lock;
    bool& is_running;
    bool& is_stopping;
    ~Running() {
      if (!lock.owns_lock()) lock.lock();
      is_running = is_stopping = false;
    }
  } const guard{lock, is_running_, is_stopping_};
  is_running_ = true;
  failure_.reset();
  bool is_paused;
  try {
    is_paused = !make_passes(until_idle, before_pass, lock);
  } catch (const ThreadExit&) {
    throw;
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    fail_all_with_thrown();
    throw;
  }
  if (is_paused) fail(DLM_CANCELLED, "before_pass asked to stop");
}

// The loop of run(), which holds the lock at its start and between passes. False: before_pass asked
// to stop.
bool Scheduler::make_passes(bool until_idle, const std::function<bool()>& before_pass,
                            std::unique_lock<std::mutex>& lock) {
  while (!is_stopping_) {
    lock.unlock();
    settle();
    if (!running_.empty()) {
      if (!before_pass()) return false;
      settle();  // before_pass may have cancelled
    }
    if (!running_.empty())
      if (const auto chosen = choose(); !chosen.empty()) pass(chosen);
    lock.lock();
    if (!waiting_.empty() || !running_.empty()) continue;
    if (until_idle) return true;
    board_->changed.wait(lock, [&] { return is_stopping_ || !waiting_.empty(); });
  }
  return true;
}

// Ends the requests that must end, and starts those that can.
void Scheduler::settle() {
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    end_what_must();
    admit();
  }
  finish_done();
}

void Scheduler::stop() {
  const std::lock_guard<std::mutex> lock(board_->mutex);
  is_stopping_ = true;
  board_->changed.notify_all();
}

// Ends the requests that were cancelled, are late or made as many passes as they may.
void Scheduler::end_what_must() {
  const Clock::time_point now = Clock::now();
  for (Jobs* const jobs : {&waiting_, &running_}) {
    for (const std::shared_ptr<Job>& job : *jobs) {
      const Limits& limits = job->limits_;
      if (job->is_cancelled_)
        end(*job, Finish::cancelled);
      else if (limits.max_steps > 0 && job->request().nfe() >= limits.max_steps)
        end(*job, Finish::steps);
      else if (limits.deadline && now >= *limits.deadline)
        end(*job, Finish::deadline);
    }
  }
}

bool Scheduler::has_room(const Job& job) const {
  const Request& request = job.request();
  if (request.done()) return true;
  if (running_.size() >= static_cast<size_t>(options_.most_running)) return false;
  if (options_.most_ms > 0 && !running_.empty()) {
    const double before =
        std::accumulate(running_.begin(), running_.end(), options_.cost.pass,
                        [](double sum, const auto& one) { return sum + one->usual_ms_; });
    if (before + job.usual_ms_ > most_ms()) return false;
  }
  return arena_ ? arena_->has_room(Member::rows_of(request))
                : rows_taken_ + rows_needed(request) <= options_.rows;
}

// Starts waiting requests, oldest first: a request never overtakes an older one that needs more
// room.
void Scheduler::admit() {
  while (!waiting_.empty()) {
    Job& job = *waiting_.front();
    try {
      if (!has_room(job)) break;
      if (!job.request().done()) start(job);
    } catch (...) {
      fail_with_thrown(job);
    }
    running_.splice(running_.end(), waiting_, waiting_.begin());
  }
  // Requests that ended while they waited.
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto next = std::next(it);
    if ((*it)->request().done()) running_.splice(running_.end(), waiting_, it);
    it = next;
  }
  told_.running = static_cast<int32_t>(running_.size());
}

void Scheduler::start(Job& job) {
  if (arena_) {
    job.member_.emplace(*job.request_, *arena_);
    return;
  }
  if (contexts_.empty()) contexts_.push_back(engine_.open_context(denoiser_.max_canvas_length));
  contexts_.reserve(contexts_.size() +
                    running_.size());  // finish() puts each back, and must not allocate
  const int64_t rows = rows_needed(*job.request_);
  std::vector<Request> one;
  one.push_back(std::move(*job.request_));
  job.alone_.emplace(denoiser_, std::move(one));
  job.context_ = std::move(contexts_.back());
  contexts_.pop_back();
  rows_taken_ += job.rows_ = rows;
}

// The current exception. Without memory for its message, the lack of memory.
Scheduler::Failure Scheduler::thrown() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return {error.status(), error.what()};
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      return {DLM_INTERNAL, error.what()};
    } catch (...) {
      return {DLM_INTERNAL, kForeign};
    }
  } catch (...) {
  }
  return {DLM_OUT_OF_MEMORY,
          "out of memory"};  // short enough for std::string to store it without an allocation
}

// Ends a request with its current canvas; if that fails, with the error.
void Scheduler::end(Job& job, Finish why) noexcept {
  try {
    job.end(why);
  } catch (...) {
    fail_with_thrown(job);
  }
}

void Scheduler::fail_with_thrown(Job& job) noexcept { fail_job(job, thrown()); }

void Scheduler::fail_job(Job& job, const Failure& failure) noexcept {
  job.status_ = failure.status;
  try {
    job.message_ = failure.message;
    make_one_line(job.message_.data(), job.message_.size());
  } catch (...) {
    job.message_.clear();  // the status has to do
  }
  try {
    job.end(Finish::cancelled);
  } catch (...) {
    job.drop();
  }
}

// Ends every request with the current exception, and keeps it for submit().
void Scheduler::fail_all_with_thrown() noexcept {
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    failure_ = thrown();
    running_.splice(running_.end(), waiting_);
  }
  while (!running_.empty()) {
    const std::shared_ptr<Job> job = running_.front();
    running_.pop_front();
    fail_job(*job, *failure_);
    finish(*job);
  }
}

// Releases the resources of a request and wakes the threads that wait for it.
void Scheduler::finish(Job& job) noexcept {
  job.member_.reset();
  if (job.context_) contexts_.push_back(std::move(job.context_));
  rows_taken_ -= std::exchange(job.rows_, 0);
  try {
    job.outcome_ = job.request().outcome();
  } catch (...) {
    fail_with_thrown(job);  // no memory for the results
  }
  const std::lock_guard<std::mutex> lock(board_->mutex);
  job.is_done_ = true;
  ++told_.finished;
  told_.running = static_cast<int32_t>(running_.size());
  board_->changed.notify_all();
}

void Scheduler::finish_done() {
  for (auto it = running_.begin(); it != running_.end();) {
    const auto next = std::next(it);
    if ((*it)->request().done()) {
      const std::shared_ptr<Job> job = *it;
      running_.erase(it);
      finish(*job);
    }
    it = next;
  }
}

// The requests of the next pass: those first that have waited longest for one. Empty if every
// request failed.
std::vector<std::shared_ptr<Job>> Scheduler::choose() {
  std::vector<std::shared_ptr<Job>> order(running_.begin(), running_.end());
  std::stable_sort(order.begin(), order.end(), [](const auto& one, const auto& other) {
    return one->served_ < other->served_;
  });
  if (!arena_) {
    order.resize(1);
    return order;
  }
  std::vector<std::shared_ptr<Job>> chosen;
  chosen.reserve(order.size());  // a request that was added to the pass must be chosen
  shared_.emplace(denoiser_, *arena_);
  for (const std::shared_ptr<Job>& job : order) {
    try {
      if (shared_->add(*job->member_, {options_.most_tokens, most_ms(), options_.cost}))
        chosen.push_back(job);
    } catch (...) {
      fail_with_thrown(*job);
    }
  }
  return chosen;
}

void Scheduler::pass(const std::vector<std::shared_ptr<Job>>& chosen) {
  ++passes_;
  for (const std::shared_ptr<Job>& job : chosen) job->served_ = passes_;
  const int32_t before = stats_.nfe;
  const double seconds_before = stats_.prefill_s + stats_.passes_s;
  try {
    const Stopwatch total(stats_.total_s);
    if (arena_)
      shared_->run(buffers_, stats_, counts_,
                   [&](size_t number) { fail_with_thrown(*chosen[number]); });
    else
      pass_alone(*chosen.front());
  } catch (...) {
    for (const std::shared_ptr<Job>& job : chosen) fail_with_thrown(*job);
  }
  const double seconds = stats_.prefill_s + stats_.passes_s,
               expected_s = arena_ ? options_.cost.of(shared_->load()) / 1000 : 0;
  if (expected_s > 0) note_pace((seconds - seconds_before) / expected_s);
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    told_.passes += stats_.nfe - before;
    told_.shares += static_cast<int64_t>(chosen.size());
    told_.busy_s = stats_.total_s;
    told_.passes_s = seconds;
    told_.expected_s += expected_s;
    told_.cache_bytes = stats_.cache_bytes;
  }
  for (const std::shared_ptr<Job>& job : chosen) {
    if (job->limits_.on_step == nullptr || job->status_ != DLM_OK) continue;
    const dlm_step view = job->request().view();
    try {
      if (job->limits_.on_step(job->limits_.user, &view) != 0)
        fail(DLM_CANCELLED, "a callback asked to stop after %d passes", view.nfe);
    } catch (...) {
      fail_with_thrown(*job);
    }
  }
}

// A mean over about the last ten passes, in which none that was held up counts much; quicker ones
// are not counted on.
void Scheduler::note_pace(double times) {
  constexpr double kShare = 0.1, kMost = 4;
  pace_ = std::max(1.0, pace_ + kShare * (std::min(times, kMost) - pace_));
}

void Scheduler::pass_alone(Job& job) {
  const dlm_stats before = job.alone_->stats();
  const dlm_pass_counts counted = job.alone_->counts();
  job.alone_->step(*job.context_, buffers_);
  const dlm_stats& now = job.alone_->stats();
  const dlm_pass_counts& counts = job.alone_->counts();
  stats_.nfe += now.nfe - before.nfe;
  stats_.prefill_s += now.prefill_s - before.prefill_s;
  stats_.passes_s += now.passes_s - before.passes_s;
  stats_.selection_s += now.selection_s - before.selection_s;
  stats_.cache_s += now.cache_s - before.cache_s;
  stats_.cache_bytes = std::max(stats_.cache_bytes, now.cache_bytes);
  counts_.prefill += counts.prefill - counted.prefill;
  counts_.denoise += counts.denoise - counted.denoise;
  counts_.store += counts.store - counted.store;
}

dlm_scheduler_stats Scheduler::told() const {
  const std::lock_guard<std::mutex> lock(board_->mutex);
  dlm_scheduler_stats found = told_;
  found.waiting = static_cast<int32_t>(waiting_.size());
  return found;
}

}  // namespace dlm
