// The Runner runs requests until all have ended. It starts waiting requests, makes passes that
// several requests share, commits tokens, and reports steps.
//
// A session calls run() on the caller's thread, and run() returns when the session's requests have
// ended. A scheduler has a thread of its own that stays in run(). Any thread may submit requests to
// it.
//
// Ownership. A Job owns its Request, statistics and result. The caller's handle keeps the Job
// alive; until the Job has ended, the runner does too. The PassMaker owns keys and values, and has
// a Member for each running Job. finish() destroys the Member first. So the Job's cache rows are
// free before any thread sees that the Job ended.
//
// Locking. The Board's mutex guards waiting_, failure_, is_running_, is_stopping_, stats_ and
// Job::is_done_. Everything else, including running_, belongs to the thread in run(). Other threads
// read a result only after they have seen is_done_. Passes, commits and callbacks run without the
// lock, so submit(), cancel() and wait() never wait for a pass.
//
// Each pass is one round of the loop in run():
//   1. End the jobs that were cancelled or reached a limit, and start waiting jobs.
//   2. Call before_pass. It may cancel jobs, so repeat step 1.
//   3. Choose jobs, and make the pass for them.
//   4. Commit tokens for each of these jobs, end those that reached a limit, and report their
//   steps.
//   5. Finish the jobs that are done.
//
// How a job ends: its last step, end() or fail_job() marks its request as done, which is final.
// After that, finish() is called for the job exactly once, by the code that removes the job from
// running_: finish_done(), fail_all_with_thrown() or drop_all(). finish() does not throw, so every
// wait ends.
#pragma once

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
    int32_t most_running = 1, most_waiting = INT32_MAX;  // most requests that run, and that wait
    int32_t most_tokens = INT32_MAX;  // limit for a pass that several requests share
    double most_ms = 0;               // limit for the expected time of such a pass; 0: no limit
    PassCost cost{};                  // used to predict this time
  };

  // denoiser and pass_maker must outlive the runner.
  Runner(const Denoiser& denoiser, PassMaker& pass_maker, const Options& options)
      : denoiser_(denoiser), pass_maker_(pass_maker), options_(options) {}
  // Must not be called while a thread is in run(). Cancels all jobs, and reports no further steps.
  ~Runner() { drop_all(); }

  // May only be called between runs, when there are no jobs.
  void set_most_running(int32_t requests) { options_.most_running = requests; }

  // Submits a request. Any thread may call it. Throws Error(DLM_BUSY) if most_waiting requests are
  // waiting already, and Error(DLM_INVALID_ARGUMENT) if the request can never fit. If an error
  // ended the last run(), throws that error.
  std::shared_ptr<Job> submit(Request request, JobOptions options);

  enum class Until { stopped, idle, pass };

  // Makes passes. `until` says when to return: after stop() (stopped), when no job is left (idle),
  // or after one pass (pass). Calls before_pass before each pass. If before_pass returns false,
  // throws Error(DLM_CANCELLED); the jobs stay for the next call.
  //
  // An error of one job ends only that job. Any other error ends every job with the error's status
  // and message, and is thrown to the caller. submit() then throws it too, until run() is called
  // again. Throws Error(DLM_INVALID_ARGUMENT) if another thread is in run().
  void run(Until until, const std::function<bool()>& before_pass);
  // Makes run() return after its current pass. If no thread is in run(), the next call of run()
  // returns at once.
  void stop();

  // Ends all jobs as cancelled, reports no further steps, and forgets the last error.
  void drop_all() noexcept;

  dlm_scheduler_stats stats() const;

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // The time limit of a pass in milliseconds of the cost model, which predicts too short times by
  // the factor pace_.
  double most_ms() const { return options_.most_ms / pace_; }
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
  void commit(const std::vector<std::shared_ptr<Job>>& chosen, const dlm_pass& made,
              const PassSeconds& seconds);
  void tell(Job& job);

  // Runs `body` for a job. If `body` throws, only that job ends.
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
  // In the order of submission. Each job is in at most one of the two lists.
  Jobs waiting_, running_;
  bool is_running_ = false, is_stopping_ = false;
  std::optional<Failure> failure_;  // error that ended the last run; guarded by the board's mutex
  uint64_t passes_ = 0;
  double pace_ = 1;  // measured time of passes divided by the predicted time, at least 1
  dlm_scheduler_stats stats_{};  // guarded by the board's mutex
};

}  // namespace dlm
