#include "scheduler.h"

#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <tuple>
#include <utility>

#include "sentence.h"

namespace dlm {
namespace {

// What is being thrown, as a status and its sentence; without memory for that, the lack of it.
std::pair<dlm_status, std::string> thrown() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return {error.status(), error.what()};
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      return {DLM_INTERNAL, error.what()};
    }
  } catch (...) {
  }
  return {DLM_OUT_OF_MEMORY, "out of memory"};  // so few letters that a string takes none for them
}

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
    : denoiser_(denoiser), engine_(engine), options_(options), arena_(engine.open_arena(options.rows)) {}

Scheduler::~Scheduler() {
  for (Jobs* const jobs : {&waiting_, &running_}) {
    for (const std::shared_ptr<Job>& job : *jobs) {
      try {
        job->end(Finish::cancelled);
      } catch (...) {
        fail_with_thrown(*job);
      }
      finish(*job);
    }
  }
}

std::shared_ptr<Job> Scheduler::submit(Request request, const Limits& limits) {
  const int64_t rows = rows_needed(request);
  if (rows > options_.rows)
    fail(DLM_INVALID_ARGUMENT,
         "this request keeps the keys and values of %lld tokens, and the scheduler has room for %lld: give it more cache_bytes, or "
         "choose a shorter canvas or cache = \"none\"",
         static_cast<long long>(rows), static_cast<long long>(options_.rows));
  const auto job = std::make_shared<Job>(board_, std::move(request), limits);
  job->usual_ms_ = options_.cost.share(job->request().usual_load(options_.cost));
  const std::lock_guard<std::mutex> lock(board_->mutex);
  if (waiting_.size() >= static_cast<size_t>(options_.most_waiting)) {
    ++told_.refused;
    fail(DLM_BUSY, "%zu requests wait already, as many as may: hand this one in again later", waiting_.size());
  }
  waiting_.push_back(job);
  ++told_.submitted;
  board_->changed.notify_all();
  return job;
}

void Scheduler::run(bool until_idle, const std::function<void()>& before_pass) {
  std::unique_lock<std::mutex> lock(board_->mutex);
  if (is_running_) fail(DLM_INVALID_ARGUMENT, "the scheduler is being run already: one thread makes the passes");
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
  while (!is_stopping_) {
    lock.unlock();
    settle();
    if (!running_.empty()) {
      before_pass();
      settle();  // before_pass may have cancelled
    }
    if (!running_.empty()) pass(choose());
    lock.lock();
    if (!waiting_.empty() || !running_.empty()) continue;
    if (until_idle) return;
    board_->changed.wait(lock, [&] { return is_stopping_ || !waiting_.empty(); });
  }
}

// Who may be done is, and who may begin does.
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

// Of all that are here: those that may take no more passes.
void Scheduler::end_what_must() {
  const Clock::time_point now = Clock::now();
  for (Jobs* const jobs : {&waiting_, &running_}) {
    for (const std::shared_ptr<Job>& job : *jobs) {
      const Limits& limits = job->limits_;
      if (job->is_cancelled_) job->end(Finish::cancelled);
      else if (limits.max_steps > 0 && job->request().nfe() >= limits.max_steps) job->end(Finish::steps);
      else if (limits.deadline && now >= *limits.deadline) job->end(Finish::deadline);
    }
  }
}

bool Scheduler::has_room(const Job& job) const {
  const Request& request = job.request();
  if (request.done()) return true;
  if (running_.size() >= static_cast<size_t>(options_.most_running)) return false;
  if (options_.most_ms > 0 && !running_.empty()) {
    const double before = std::accumulate(running_.begin(), running_.end(), options_.cost.pass,
                                          [](double sum, const auto& one) { return sum + one->usual_ms_; });
    if (before + job.usual_ms_ > most_ms()) return false;
  }
  return arena_ ? arena_->has_room(Member::rows_of(request)) : rows_taken_ + rows_needed(request) <= options_.rows;
}

// In the order of their coming: nobody is overtaken by one that needs less room.
void Scheduler::admit() {
  while (!waiting_.empty() && has_room(*waiting_.front())) {
    running_.splice(running_.end(), waiting_, waiting_.begin());
    Job& job = *running_.back();
    if (job.request().done()) continue;
    try {
      start(job);
    } catch (...) {
      fail_with_thrown(job);
    }
  }
  // What was cancelled, or is late, need not wait for its turn.
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
  contexts_.reserve(contexts_.size() + running_.size());  // all come back, which must not want memory
  const int64_t rows = rows_needed(*job.request_);
  std::vector<Request> one;
  one.push_back(std::move(*job.request_));
  job.alone_.emplace(denoiser_, std::move(one));
  job.context_ = std::move(contexts_.back());
  contexts_.pop_back();
  rows_taken_ += job.rows_ = rows;
}

// It is done then, with what is being thrown.
void Scheduler::fail_with_thrown(Job& job) noexcept {
  std::tie(job.status_, job.message_) = thrown();
  make_one_line(job.message_.data(), job.message_.size());
  try {
    job.end(Finish::cancelled);
  } catch (...) {
    job.drop();  // whoever waits is told, if nothing else
  }
}

// Takes what it had; its owner sees the results from now on.
void Scheduler::finish(Job& job) noexcept {
  job.member_.reset();
  if (job.context_) contexts_.push_back(std::move(job.context_));
  rows_taken_ -= std::exchange(job.rows_, 0);
  try {
    job.outcome_ = job.request().outcome();
  } catch (...) {
    fail_with_thrown(job);  // the memory for them is not there; whoever waits is told
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

// Who takes part in the next pass: those first that have waited for one longest.
std::vector<std::shared_ptr<Job>> Scheduler::choose() {
  std::vector<std::shared_ptr<Job>> order(running_.begin(), running_.end());
  std::stable_sort(order.begin(), order.end(), [](const auto& one, const auto& other) { return one->served_ < other->served_; });
  if (!arena_) {
    order.resize(1);
    return order;
  }
  std::vector<std::shared_ptr<Job>> chosen;
  shared_.emplace(denoiser_, *arena_);
  for (const std::shared_ptr<Job>& job : order)
    if (shared_->add(*job->member_, {options_.most_tokens, most_ms(), options_.cost})) chosen.push_back(job);
  return chosen;
}

void Scheduler::pass(const std::vector<std::shared_ptr<Job>>& chosen) {
  ++passes_;
  for (const std::shared_ptr<Job>& job : chosen) job->served_ = passes_;
  const int32_t before = stats_.nfe;
  const double seconds_before = stats_.prefill_s + stats_.passes_s;
  try {
    const Stopwatch total(stats_.total_s);
    if (arena_) shared_->run(buffers_, stats_, counts_, [&](size_t number) { fail_with_thrown(*chosen[number]); });
    else pass_alone(*chosen.front());
  } catch (...) {
    for (const std::shared_ptr<Job>& job : chosen) fail_with_thrown(*job);
  }
  const double seconds = stats_.prefill_s + stats_.passes_s, expected_s = arena_ ? options_.cost.of(shared_->load()) / 1000 : 0;
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
    if (job->limits_.on_step(job->limits_.user, &view) == 0) continue;
    try {
      fail(DLM_CANCELLED, "a callback asked to stop after %d passes", view.nfe);
    } catch (...) {
      fail_with_thrown(*job);
    }
  }
}

// A mean over about the last ten passes, in which none that was held up counts much; quicker ones are not counted on.
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
