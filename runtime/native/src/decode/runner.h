// The Runner runs requests until all of them have ended. It starts waiting requests, makes passes
// that several requests share, commits tokens, and reports steps.
//
// A session calls run() on the caller's thread. run() returns when the session's requests have
// ended. For a scheduler, one thread of the program stays in run(). Any thread may submit requests
// to a scheduler.
//
// Ownership. A Job owns its Request, statistics and result. The caller's handle keeps the Job
// alive, and so does the runner until the Job has ended. The PassMaker owns the keys and values,
// and creates a Member for each running Job. finish() destroys the Member before it marks the Job
// as ended. So the Job's cache rows are free before any thread sees that the Job has ended.
//
// Locking. The Board's mutex guards waiting_, failure_, is_running_, is_stopping_, stats_ and
// Job::is_done_. Only the thread in run() uses all other members, including running_. Any other
// thread may use a result only after it has seen that is_done_ is true. The thread in run() does
// not hold the lock during passes, commits and callbacks. So a pass never delays submit() or
// cancel().
//
// Each pass is one iteration of the loop in run():
//   1. End the jobs that were cancelled or reached a limit, and start waiting jobs.
//   2. Call before_pass. before_pass may cancel jobs, so step 1 is repeated.
//   3. Choose jobs, and make the pass for them.
//   4. Commit tokens for each of these jobs, end the jobs that reached a limit, and report the
//      jobs' steps.
//   5. Finish the jobs that are done.
//
// How a job ends. First, the job's request becomes done: in its last step, or by a call of end() or
// fail_job(). A request that is done stays done. Then finish_done(), fail_all_with_thrown() or
// drop_all() removes the job from running_, and calls finish() exactly once for the job. finish()
// does not throw, so every thread that waits for the job wakes up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "decode/job.h"
#include "decode/pass_maker.h"

namespace dlm {

class Runner {
 public:
  struct Options {
    // The largest number of requests that run at the same time, and the largest number of requests
    // that wait.
    int32_t most_running = 1, most_waiting = INT32_MAX;
    int32_t most_tokens = INT32_MAX;  // limit for the tokens of a shared pass
    double most_ms = 0;     // limit for the predicted milliseconds of a shared pass; 0: no limit
    PassCost cost{};        // predicts the milliseconds of a pass
    int32_t ended_fd = -1;  // descriptor to which run() writes 8 bytes per ended job, or -1
  };

  // `denoiser` and `pass_maker` must outlive the runner.
  Runner(const Denoiser& denoiser, PassMaker& pass_maker, const Options& options)
      : denoiser_(denoiser), pass_maker_(pass_maker), options_(options) {}
  // Cancels all jobs, and reports no more steps. The destructor must not be called while a thread
  // is in run().
  ~Runner() { drop_all(); }

  // Call this function only while no thread is in run() and there are no jobs.
  void set_most_running(int32_t requests) { options_.most_running = requests; }

  // Submits a request. Any thread may call this function. Throws an Error with status DLM_BUSY if
  // most_waiting requests are already waiting, and an Error with status DLM_INVALID_ARGUMENT if the
  // request can never fit. If the last run() ended with an error, throws that error.
  std::shared_ptr<Job> submit(Request request, JobOptions options);

  enum class Until { stopped, idle, pass };

  // Makes passes, and calls before_pass before each pass. `until` selects when run() returns. With
  // `stopped`, run() returns after a call of stop(). With `idle`, run() returns when no job is
  // left. With `pass`, run() returns after one pass. If before_pass returns false, run() throws an
  // Error with status DLM_CANCELLED. The jobs then remain for the next call of run().
  //
  // An error of one job ends only this job. Any other error ends every job with the status and
  // message of the error, and run() throws the error. Until the next call of run(), submit() throws
  // it too. Throws an Error with status DLM_INVALID_ARGUMENT if another thread is in run().
  void run(Until until, const std::function<bool()>& before_pass);
  // Makes run() return after its current pass. If no thread is in run(), the next call of run()
  // returns without a pass.
  void stop();

  // Ends all jobs with the status of a cancelled job, and clears the last error. Reports no more
  // steps.
  void drop_all() noexcept;

  dlm_scheduler_stats stats() const;

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // Returns the limit for the predicted milliseconds of a pass. The measured time of a pass is
  // about pace_ times its predicted time, so the option's limit is divided by pace_.
  double most_ms() const { return options_.most_ms / pace_; }
  PassLimits limits() const {
    return {std::min(options_.most_tokens, pass_maker_.most_tokens()), most_ms(), options_.cost};
  }
  void note_pace(double times);

  bool make_passes(Until until, const std::function<bool()>& before_pass,
                   std::unique_lock<std::mutex>& lock);
  void settle();
  void end_if_due(Job& job, Clock::time_point now);
  bool has_room(const Job& job) const;
  void admit();
  void finish_done();
  std::vector<std::shared_ptr<Job>> choose();
  void pass(const std::vector<std::shared_ptr<Job>>& chosen);
  void commit(const std::vector<std::shared_ptr<Job>>& chosen, const Pass& made,
              const PassSeconds& seconds);
  void tell(Job& job);

  // Calls `body`, which works on one job. If `body` throws, only that job ends.
  template <class Body>
  static void guard(Job& job, Body body);
  static void end(Job& job, int32_t why) noexcept;
  static void fail_job(Job& job, const Failure& failure) noexcept;
  void fail_all_with_thrown() noexcept;
  void finish(Job& job) noexcept;

  const Denoiser& denoiser_;
  PassMaker& pass_maker_;
  Options options_;
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();
  Buffers buffers_;
  // Both lists are in the order of submission. A job is in at most one of the two lists.
  Jobs waiting_, running_;
  bool is_running_ = false, is_stopping_ = false;
  std::optional<Failure> failure_;  // the error that ended the last run(), if any
  uint64_t passes_ = 0;
  double pace_ = 1;  // average of the measured time of a pass / its predicted time, at least 1
  dlm_scheduler_stats stats_{};  // guarded by the board's mutex
};

}  // namespace dlm
