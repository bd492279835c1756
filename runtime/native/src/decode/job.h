// A job is a submitted request, together with its options, result, statistics and error.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "decode/cancelling.h"
#include "decode/pass_maker.h"
#include "decode/request.h"
#include "decode/text_writer.h"

namespace dlm {

// The options of a request that the runner needs.
struct JobOptions : JobLimits {
  std::unique_ptr<TextWriter> writer;  // writes the request's text, or NULL
  dlm_step_fn on_step = nullptr;
  void* user = nullptr;
};

// Contains a mutex that all jobs of a runner share, and a condition variable that is signalled when
// a job ends. Both the thread that runs the jobs and the threads that wait for them use the Board.
// The Board outlives the jobs and the runner.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
};

class Job : public Cancelling {
 public:
  Job(std::shared_ptr<Board> board, Request request, JobOptions options)
      : board_(std::move(board)), options_(std::move(options)), request_(std::move(request)) {
    stats_.struct_size = sizeof stats_;
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Waits until the job has ended or `time` has passed. Without `time`, waits without a limit.
  // Returns true if the job has ended.
  bool wait(std::optional<Clock::duration> time) const {
    std::unique_lock<std::mutex> lock(board_->mutex);
    const auto is_done = [&] { return is_done_; };
    if (time) return board_->changed.wait_for(lock, *time, is_done);
    board_->changed.wait(lock, is_done);
    return true;
  }

  // Returns the result. Call this function only after the job has ended. Pointers in the result are
  // valid as long as the job exists.
  const dlm_result& result() const { return result_; }

  // Returns the last step that was reported. Only the thread that runs the job may call this
  // function.
  const dlm_step& step() const { return step_; }
  const Request& request() const { return request_; }

 private:
  friend class Runner;

  const std::shared_ptr<Board> board_;
  JobOptions options_;
  Request request_;
  std::unique_ptr<Member> member_;  // set while the job runs
  double usual_ms_ = 0;             // expected milliseconds that this job adds to a pass
  uint64_t served_ = 0;             // number of the last pass that the job took part in
  dlm_step step_{};
  bool was_told_done_ = false;  // true if on_step was called for the last step of the job
  bool is_done_ = false;        // guarded by the board's mutex
  dlm_status status_ = DLM_OK;
  std::string message_;
  dlm_stats stats_{};
  dlm_result result_{};
};

}  // namespace dlm
