// The C ABI functions that cancel requests (decode/cancelling.h). Any thread may call them.
#include "api/session.h"

void dlm_session_cancel(dlm_session* session, size_t number) {
  if (session == nullptr) return;
  const std::lock_guard<std::mutex> lock(session->jobs_mutex);
  for (size_t i = 0; i < session->jobs.size(); ++i)
    if (number == i || number == DLM_ALL_REQUESTS) session->jobs[i]->cancel();
}

void dlm_job_cancel(dlm_job* job) {
  if (job != nullptr) job->job->cancel();
}
