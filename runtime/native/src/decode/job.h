// A job is a request that was submitted, with its options, result, statistics and error.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "decode/pass_maker.h"
#include "decode/request.h"
#include "decode/text_writer.h"

namespace dlm {

using Clock = std::chrono::steady_clock;

// A request's limits, the writer of its text, and the callback that is called after its steps.
struct JobOptions {
  int32_t max_steps = 0;  // most passes of the request; 0: no limit
  std::optional<Clock::time_point> deadline;
  std::unique_ptr<TextWriter> writer;  // NULL: the request makes no text
  dlm_step_fn on_step = nullptr;
  void* user = nullptr;
};

// The mutex of all jobs of a runner, and the condition that is signalled when a job ends. The
// threads that wait for jobs and the thread that runs them share it. It outlives the jobs and the
// runner.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
};

class Job {
 public:
  Job(std::shared_ptr<Board> board, Request request, JobOptions options)
      : board_(std::move(board)), options_(std::move(options)), request_(std::move(request)) {
    stats_.struct_size = sizeof stats_;
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Ends the job after at most one more pass. The tokens decided so far are kept. Any thread may
  // call it.
  void cancel() { is_cancelled_ = true; }

  // Waits until the job has ended, but at most `time`. Without a time, waits forever. Returns
  // whether the job has ended.
  bool wait(std::optional<Clock::duration> time) const {
    std::unique_lock<std::mutex> lock(board_->mutex);
    const auto is_done = [&] { return is_done_; };
    if (time) return board_->changed.wait_for(lock, *time, is_done);
    board_->changed.wait(lock, is_done);
    return true;
  }

  // The result. Call it only after the job has ended. Pointers in the result live as long as the
  // job.
  const dlm_result& result() const { return result_; }

  // The last step. Only the thread that runs the job may call it.
  const dlm_step& step() const { return step_; }
  const Request& request() const { return request_; }

 private:
  friend class Runner;

  const std::shared_ptr<Board> board_;
  JobOptions options_;
  Request request_;
  std::unique_ptr<Member> member_;  // set while the job runs
  double usual_ms_ = 0;             // expected time of its share of a pass, in ms
  uint64_t served_ = 0;             // number of the last pass that the job took part in
  dlm_step step_{};
  bool was_told_done_ = false;  // true if the step with which it ended was reported
  std::atomic<bool> is_cancelled_{false};
  bool is_done_ = false;  // guarded by the board's mutex
  dlm_status status_ = DLM_OK;
  std::string message_;
  dlm_stats stats_{};
  dlm_result result_{};
};

}  // namespace dlm
