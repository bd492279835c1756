// How a job ends before its canvas is full: a thread cancels it, or it reaches one of its limits.
// The runner calls Runner::end_if_due (cancelling.cc) for each job between passes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "dlm_runtime.h"

namespace dlm {

using Clock = std::chrono::steady_clock;

struct JobLimits {
  int32_t max_steps = 0;  // largest number of passes that the request may use; 0: no limit
  std::optional<Clock::time_point> deadline;
};

class Cancelling {
 public:
  // Makes the job end after at most one more pass. The job's result keeps the tokens that were
  // decided so far. Any thread may call this function.
  void cancel() { is_cancelled_ = true; }

  // Returns why the job must end now: it was cancelled, has used all its passes, or is past its
  // deadline. Otherwise returns DLM_FINISH_NONE. `steps` is Request::planned_nfe().
  int32_t cancelled_by(const JobLimits& limits, int32_t steps, Clock::time_point now) const {
    if (is_cancelled_) return DLM_FINISH_CANCELLED;
    if (limits.max_steps > 0 && steps >= limits.max_steps) return DLM_FINISH_STEPS;
    return limits.deadline && now >= *limits.deadline ? DLM_FINISH_DEADLINE : DLM_FINISH_NONE;
  }

 private:
  std::atomic<bool> is_cancelled_{false};
};

}  // namespace dlm
