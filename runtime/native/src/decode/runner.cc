#include "decode/runner.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/one_line.h"

namespace dlm {

template <class Body>
void Runner::guard(Job& job, Body body) {
  try {
    body();
  } catch (const ThreadExit&) {
    throw;
  } catch (...) {
    fail_job(job, thrown());
  }
}

void Runner::fail_job(Job& job, const Failure& failure) noexcept {
  if (job.status_ == DLM_OK) {
    job.status_ = failure.status;
    try {
      job.message_ = failure.message;
      make_one_line(job.message_.data(), job.message_.size());
    } catch (...) {
      job.message_.clear();  // if there is no memory for the message, report only the status
    }
  }
  try {
    job.request_.end(DLM_FINISH_CANCELLED);
  } catch (...) {
    job.request_.drop();
  }
}

// Ends every job with the exception that is being handled. Also stores this exception, so that
// submit() can throw it.
void Runner::fail_all_with_thrown() noexcept {
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

void Runner::drop_all() noexcept {
  failure_.reset();
  running_.splice(running_.end(), waiting_);
  while (!running_.empty()) {
    const std::shared_ptr<Job> job = running_.front();
    running_.pop_front();
    end(*job, DLM_FINISH_CANCELLED);
    finish(*job);
  }
}

std::shared_ptr<Job> Runner::submit(Request request, JobOptions options) {
  const RowCounts rows = rows_of(request, pass_maker_.page_rows()), room = pass_maker_.rows();
  if (rows.full > room.full)
    fail(DLM_INVALID_ARGUMENT,
         "this request needs cache for %lld tokens, but the scheduler has room for "
         "%lld: give it more cache_bytes, or choose a shorter canvas or cache = \"none\"",
         static_cast<long long>(rows.full), static_cast<long long>(room.full));
  if (rows.window > room.window)
    fail(DLM_INVALID_ARGUMENT,
         "in layers with a window, this request needs cache for %lld tokens, but the scheduler has "
         "room for %lld: give it more cache_bytes, or choose a shorter canvas or block_length",
         static_cast<long long>(rows.window), static_cast<long long>(room.window));
  const auto job = std::make_shared<Job>(board_, std::move(request), std::move(options));
  job->usual_ms_ = options_.cost.share(job->request().usual_load(options_.cost));
  const std::lock_guard<std::mutex> lock(board_->mutex);
  if (failure_)
    throw Error(failure_->status, "the scheduler takes no more requests, because a pass failed: " +
                                      failure_->message);
  if (waiting_.size() >= static_cast<size_t>(options_.most_waiting)) {
    ++stats_.refused;
    fail(DLM_BUSY, "%zu requests are waiting, which is the limit: submit this one again later",
         waiting_.size());
  }
  waiting_.push_back(job);
  ++stats_.submitted;
  board_->changed.notify_all();
  return job;
}

void Runner::run(Until until, const std::function<bool()>& before_pass) {
  std::unique_lock<std::mutex> lock(board_->mutex);
  if (is_running_)
    fail(DLM_INVALID_ARGUMENT, "the scheduler is already running: one thread makes the passes");
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
    is_paused = !make_passes(until, before_pass, lock);
  } catch (const ThreadExit&) {
    throw;
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    fail_all_with_thrown();
    throw;
  }
  if (is_paused) fail(DLM_CANCELLED, "before_pass asked to stop");
}

// Runs the loop of run(). The caller must hold the lock. The loop releases the lock while passes,
// commits and callbacks run. Returns false if before_pass returned false.
bool Runner::make_passes(Until until, const std::function<bool()>& before_pass,
                         std::unique_lock<std::mutex>& lock) {
  while (!is_stopping_) {
    lock.unlock();
    settle();
    if (!running_.empty()) {
      if (!before_pass()) return false;
      settle();  // repeated, because before_pass may have cancelled jobs
    }
    if (!running_.empty()) {
      if (const auto chosen = choose(); !chosen.empty()) pass(chosen);
      finish_done();
    }
    lock.lock();
    if (until == Until::pass) return true;
    if (!waiting_.empty() || !running_.empty()) continue;
    if (until == Until::idle) return true;
    board_->changed.wait(lock, [&] { return is_stopping_ || !waiting_.empty(); });
  }
  return true;
}

// Ends the jobs that were cancelled or reached a limit, and starts the waiting jobs that fit.
void Runner::settle() {
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    const Clock::time_point now = Clock::now();
    for (Jobs* const jobs : {&waiting_, &running_})
      for (const std::shared_ptr<Job>& job : *jobs) end_if_due(*job, now);
    admit();
  }
  finish_done();
}

void Runner::stop() {
  const std::lock_guard<std::mutex> lock(board_->mutex);
  is_stopping_ = true;
  board_->changed.notify_all();
}

bool Runner::has_room(const Job& job) const {
  if (job.request_.done()) return true;
  if (running_.size() >= static_cast<size_t>(options_.most_running)) return false;
  if (options_.most_ms > 0 && !running_.empty()) {
    const double before =
        std::accumulate(running_.begin(), running_.end(), options_.cost.pass,
                        [](double sum, const auto& one) { return sum + one->usual_ms_; });
    if (before + job.usual_ms_ > most_ms()) return false;
  }
  return pass_maker_.has_room(job.request_);
}

// Starts waiting jobs, oldest first. If a job does not fit yet, all younger jobs wait too.
void Runner::admit() {
  while (!waiting_.empty()) {
    Job& job = *waiting_.front();
    bool is_admitted = true;
    guard(job, [&] {
      is_admitted = has_room(job);
      if (is_admitted && !job.request_.done())
        job.member_ = pass_maker_.start(job.request_, limits());
    });
    if (!is_admitted) break;
    running_.splice(running_.end(), waiting_, waiting_.begin());
  }
  // Remove the jobs that ended while they waited.
  for (auto it = waiting_.begin(); it != waiting_.end();)
    if (const auto job = it++; (*job)->request_.done())
      running_.splice(running_.end(), waiting_, job);
  stats_.running = static_cast<int32_t>(running_.size());
}

void Runner::finish_done() {
  for (auto it = running_.begin(); it != running_.end();) {
    const auto place = it++;
    const std::shared_ptr<Job> job = *place;
    if (!job->request_.done()) continue;
    if (job->status_ == DLM_OK && !job->was_told_done_) guard(*job, [&] { tell(*job); });
    running_.erase(place);
    finish(*job);
  }
}

// Writes the job's result, frees its cache, and wakes the threads that wait for the job.
void Runner::finish(Job& job) noexcept {
  job.member_.reset();
  const TextWriter* const writer = job.options_.writer.get();
  job.stats_.nfe = job.request_.nfe();
  job.result_ = job.request_.result();
  dlm_result& result = job.result_;
  result.struct_size = sizeof result;
  result.status = job.status_;
  result.message = job.message_.c_str();
  result.stats = &job.stats_;
  result.text = "";
  if (writer != nullptr) {
    result.text = writer->text().c_str();
    result.text_size = writer->text().size();
    result.is_text_decided = writer->is_decided(job.request_) ? 1 : 0;
    // If some tokens of the text are not decided, a stop string ends only the text and not the
    // request. In this case, the field `finish` still says why the request ended.
    if (writer->is_stopped() && result.is_text_decided != 0) {
      result.finish = DLM_FINISH_STOP;
      result.completion_tokens = writer->completion_tokens();
    }
  }
  if (job.status_ != DLM_OK) result.finish = DLM_FINISH_NONE;
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    job.is_done_ = true;
    ++stats_.finished;
    stats_.prefix_bytes = pass_maker_.prefix_bytes();
    stats_.running = static_cast<int32_t>(running_.size());
    board_->changed.notify_all();
  }
  if (options_.ended_fd < 0) return;
  // If the pipe is full, the write fails. This is harmless, because a full pipe wakes its reader
  // anyway.
  constexpr uint64_t kOne = 1;
  [[maybe_unused]] const auto written = write(options_.ended_fd, &kOne, sizeof kOne);
}

// Chooses the jobs of the next pass. Prefers the jobs that have waited longest. Returns an empty
// list if all jobs failed.
std::vector<std::shared_ptr<Job>> Runner::choose() {
  std::vector<std::shared_ptr<Job>> order(running_.begin(), running_.end()), chosen;
  std::stable_sort(order.begin(), order.end(), [](const auto& one, const auto& other) {
    return one->served_ < other->served_;
  });
  int64_t hits = 0, tokens = 0;
  for (const std::shared_ptr<Job>& job : order)
    guard(*job, [&] {
      pass_maker_.reuse(*job->member_);
      const int32_t before = std::exchange(job->stats_.cached_tokens, job->member_->reused);
      hits += before == 0 && job->member_->reused > 0 ? 1 : 0;
      tokens += job->member_->reused - before;
      job->request_.find_positions();
      job->member_->needs = job->request_.needs();
    });
  order.erase(std::remove_if(order.begin(), order.end(),
                             [](const auto& job) { return job->request_.done(); }),
              order.end());
  if (tokens > 0) {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    stats_.prefix_hits += hits;
    stats_.prefix_tokens += tokens;
  }
  if (order.empty()) return chosen;
  std::vector<Member*> members;
  for (const std::shared_ptr<Job>& job : order) members.push_back(job->member_.get());
  for (const size_t number : pass_maker_.choose(members, limits())) chosen.push_back(order[number]);
  return chosen;
}

// Makes one pass for the chosen jobs, commits tokens, and reports the steps.
void Runner::pass(const std::vector<std::shared_ptr<Job>>& chosen) {
  ++passes_;
  std::vector<Member*> members;
  PassLoad load;
  for (const std::shared_ptr<Job>& job : chosen) {
    job->served_ = passes_;
    members.push_back(job->member_.get());
    load += job->request_.load();
  }
  PassSeconds seconds;
  double total_s = 0;
  bool is_made = false;
  {
    const Stopwatch total(total_s);
    Pass made{};
    try {
      made = pass_maker_.run(members, buffers_, seconds);
      is_made = true;
    } catch (const ThreadExit&) {
      throw;
    } catch (...) {
      const Failure failure = thrown();
      for (const std::shared_ptr<Job>& job : chosen) fail_job(*job, failure);
    }
    if (is_made) commit(chosen, made, seconds);
  }
  for (const std::shared_ptr<Job>& job : chosen)
    job->stats_.total_s += total_s / static_cast<double>(chosen.size());
  const double expected_s = options_.cost.of(load) / 1000;
  if (expected_s > 0) note_pace(seconds.engine / expected_s);
  {
    const std::lock_guard<std::mutex> lock(board_->mutex);
    stats_.passes += is_made ? 1 : 0;
    stats_.shares += static_cast<int64_t>(chosen.size());
    stats_.busy_s += total_s;
    stats_.passes_s += seconds.engine;
    stats_.expected_s += expected_s;
    stats_.cache_bytes = std::max(stats_.cache_bytes, pass_maker_.cache_bytes());
  }
  const Clock::time_point now = Clock::now();
  for (const std::shared_ptr<Job>& job : chosen) {
    if (job->status_ != DLM_OK) continue;
    end_if_due(*job, now);
    guard(*job, [&] { tell(*job); });
  }
}

void Runner::commit(const std::vector<std::shared_ptr<Job>>& chosen, const Pass& made,
                    const PassSeconds& seconds) {
  const auto sharers = static_cast<double>(chosen.size());
  rule_out_unused(denoiser_, made);
  for (const std::shared_ptr<Job>& job : chosen) {
    dlm_stats& stats = job->stats_;
    const Member& member = *job->member_;
    const PassKind kind = job->request_.stage().kind;
    const bool decides = kind == PassKind::denoise || kind == PassKind::verify;
    ++(kind == PassKind::denoise  ? stats.denoise_passes
       : kind == PassKind::verify ? stats.verify_passes
       : kind == PassKind::store  ? stats.store_passes
                                  : stats.prefill_passes);
    (decides ? stats.passes_s : stats.prefill_s) += seconds.engine / sharers;
    stats.cache_s += seconds.cache / sharers;
    stats.cache_bytes = std::max(stats.cache_bytes, member.cache_bytes);
    const Stopwatch timer(stats.selection_s);
    guard(*job, [&] {
      const Predictions found =
          predictions_of(denoiser_, job->request_, made, member.first_row, member.apart, buffers_);
      job->request_.step(found, buffers_.proposals);
      if (kind == PassKind::verify) stats.verified_tokens += job->request_.committed();
    });
  }
}

// Reports a step of a job. Updates the text, which may end the request, and then calls on_step.
void Runner::tell(Job& job) {
  TextWriter* const writer = job.options_.writer.get();
  if (writer != nullptr && !writer->read(job.request_) && !job.request_.done())
    job.request_.end(DLM_FINISH_STOP);
  job.step_ = job.request_.view();
  job.was_told_done_ = job.request_.done();
  if (writer != nullptr) {
    job.step_.text = writer->piece().data();
    job.step_.text_size = writer->piece().size();
  }
  if (job.options_.on_step != nullptr && job.options_.on_step(job.options_.user, &job.step_) != 0)
    fail(DLM_CANCELLED, "a callback asked to stop after %d passes", job.step_.nfe);
}

// Updates pace_ after a pass. `times` is the measured time of the pass divided by its predicted
// time. pace_ is an exponential average of this ratio over about ten passes. If `times` is above
// kMost, the function uses kMost instead.
void Runner::note_pace(double times) {
  constexpr double kShare = 0.1, kMost = 4;
  pace_ = std::max(1.0, pace_ + kShare * (std::min(times, kMost) - pace_));
}

dlm_scheduler_stats Runner::stats() const {
  const std::lock_guard<std::mutex> lock(board_->mutex);
  dlm_scheduler_stats found = stats_;
  found.struct_size = sizeof found;
  found.waiting = static_cast<int32_t>(waiting_.size());
  return found;
}

}  // namespace dlm
