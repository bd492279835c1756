// Runs requests: admits them, makes passes over several, commits, and reports steps, until all end.
//
// A session calls run() on the caller's thread, until its requests have ended. A scheduler has its
// own thread in run(), and any thread submits.
//
// Ownership. A Job owns its Request, statistics and result. Its handle and, until it has ended, the
// runner hold it. The PassMaker owns keys and values; a running job has a Member there. finish()
// destroys the Member first, so the rows are free before any thread sees that the job ended.
//
// Locking. The Board's mutex guards waiting_, failure_, is_running_, is_stopping_, stats_ and
// Job::is_done_. Everything else, including running_, belongs to the thread in run(). Other threads
// read a result only after they have seen is_done_. Passes, commits and callbacks run without the
// lock, so submit(), cancel() and wait() never wait for a pass.
//
// One round: end the jobs that are due and start waiting jobs; call before_pass, which may cancel;
// end and start jobs again. Then choose, make the pass, commit for each of its jobs, end those that
// are due, and report their steps. Last, finish the jobs that are done.
//
// How a job ends: its last step, end() or fail_job() marks its request as done, for good. Only
// finish_done(), fail_all_with_thrown() and drop_all() remove a job from running_, and each calls
// finish() once for it. finish() does not throw, so every wait ends.
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
    int32_t most_running = 1, most_waiting = INT32_MAX;  // requests
    int32_t most_tokens = INT32_MAX;                     // of a pass that several requests share
    double most_ms = 0;  // expected time of such a pass; 0: no limit
    PassCost cost{};     // predicts that time
  };

  // denoiser and pass_maker must outlive it.
  Runner(const Denoiser& denoiser, PassMaker& pass_maker, const Options& options)
      : denoiser_(denoiser), pass_maker_(pass_maker), options_(options) {}
  // Must not be called while a thread is in run(). Cancels all jobs, without reporting a step.
  ~Runner() { drop_all(); }

  // Only between runs, when no job is left.
  void set_most_running(int32_t requests) { options_.most_running = requests; }

  // Any thread may call it. Throws Error(DLM_BUSY) if most_waiting requests are waiting,
  // DLM_INVALID_ARGUMENT if the request can never fit, or the error that ended the last run().
  std::shared_ptr<Job> submit(Request request, JobOptions options);

  enum class Until { stopped, idle, pass };

  // Makes passes until stop(), until no job is left, or one pass. Calls before_pass before each. If
  // it returns false, throws Error(DLM_CANCELLED); the jobs stay for the next call.
  //
  // An error of one job ends that job only. Any other error ends every job with its status and
  // message, and is rethrown; submit() throws it too, until the next call of run(). Throws
  // Error(DLM_INVALID_ARGUMENT) if another thread is in run().
  void run(Until until, const std::function<bool()>& before_pass);
  // Ends the current run() after its pass. If no thread is in run(), the next call returns at once.
  void stop();

  // Ends all jobs as cancelled, without reporting another step, and clears the last error.
  void drop_all() noexcept;

  dlm_scheduler_stats stats() const;

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // The time limit of a pass, in the cost model's milliseconds.
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

  // The error boundary of a job: an exception from `body` ends that job only.
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
  Jobs waiting_, running_;  // in the order of submission; a job is in at most one of them
  bool is_running_ = false, is_stopping_ = false;
  std::optional<Failure> failure_;  // ended the last run; under the board's mutex
  uint64_t passes_ = 0;
  double pace_ = 1;              // measured pass time divided by the predicted time, at least 1
  dlm_scheduler_stats stats_{};  // under the board's mutex
};

}  // namespace dlm
