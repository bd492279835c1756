// Ends jobs that were cancelled or that reached a limit.
#include "decode/cancelling.h"

#include "decode/runner.h"

namespace dlm {

// Ends a job, and uses its canvas as the result. If Request::end() throws an exception, the job
// fails with this error.
void Runner::end(Job& job, int32_t why) noexcept {
  try {
    job.request_.end(why);
  } catch (...) {
    fail_job(job, thrown());
  }
}

void Runner::end_if_due(Job& job, Clock::time_point now) {
  const int32_t why = job.cancelled_by(job.options_, job.request_.planned_nfe(), now);
  if (why != DLM_FINISH_NONE) end(job, why);
}

}  // namespace dlm
