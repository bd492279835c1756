// Runs requests: admits them, makes passes of several, commits, and reports steps, until all end.
//
// A session runs until its requests have ended, on the caller's thread. A scheduler is the same
// with a thread of its own: any thread submits, one thread is in run().
//
// Who owns what. A Job owns its Request, statistics and result. Its handle and, until it has ended,
// the runner hold it. The PassMaker owns keys and values; a running job has a Member there.
// finish() destroys the member first, so the rows are free before anyone sees that the job ended.
//
// The lock is the Board's mutex. It guards waiting_, failure_, is_running_, is_stopping_, stats_
// and Job::is_done_. All else, running_ too, belongs to the thread in run(). Other threads read a
// result only after they have seen is_done_. Passes, commits and callbacks run without the lock, so
// that submit(), cancel() and wait() never wait for a pass.
//
// The order of one round: end the jobs that are due, start waiting ones, ask before_pass, do both
// again (before_pass may cancel), choose, make the pass, commit for all its jobs, end those that
// are due, and tell of each one's step; last, finish the jobs that are done.
//
// How a job ends: its last step, end() or fail_job() makes its request done, for good. Only
// finish_done(), fail_all_with_thrown() and drop_all() take a job out of running_, and each calls
// finish() once for it. finish() throws nothing, so every wait ends.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "decode/job.h"
#include "decode/pass_maker.h"

namespace dlm {

class Runner {
 public:
  struct Options {
    int32_t most_running = 1, most_waiting = INT32_MAX;  // requests
    int32_t most_tokens = INT32_MAX;                     // of a pass that several share
    double most_ms = 0;  // that such a pass is expected to take; 0: any time
    PassCost cost{};     // by this
  };

  // denoiser and pass_maker must outlive it.
  Runner(const Denoiser& denoiser, PassMaker& pass_maker, const Options& options)
      : denoiser_(denoiser), pass_maker_(pass_maker), options_(options) {}
  // Must not be called while a thread is in run(). Cancels all jobs, without telling of a step.
  ~Runner() { drop_all(); }

  // Between runs, while no job is left.
  void set_most_running(int32_t requests) { options_.most_running = requests; }

  // From any thread. Throws Error(DLM_BUSY) if most_waiting requests wait, DLM_INVALID_ARGUMENT if
  // there can never be room for the request, or the error that ended the last run().
  std::shared_ptr<Job> submit(Request request, JobOptions options);

  enum class Until { stopped, idle, pass };

  // Makes passes until stop(), until no job is left, or one pass. Calls before_pass before each. If
  // that returns false, throws Error(DLM_CANCELLED), and the jobs stay for the next call.
  //
  // An error of one job ends that job alone. Any other error ends every job with its status and
  // message, and is thrown; until the next call, submit() throws it too. Throws
  // Error(DLM_INVALID_ARGUMENT) if another thread is in this call.
  void run(Until until, const std::function<bool()>& before_pass);
  // Ends the current call of run() after its pass; without one, the next call returns at once.
  void stop();

  // Ends all jobs as cancelled, without telling of another step, and forgets the last error.
  void drop_all() noexcept;

  dlm_scheduler_stats stats() const;

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // How much of the cost's time a pass may be planned for.
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

  // The error boundary of a job: what `body` throws ends that job alone.
  template <class Body>
  static void guard(Job& job, Body body);
  static void end(Job& job, Finish why) noexcept;
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
  std::optional<Failure> failure_;  // that ended the last run; under the board's mutex
  uint64_t passes_ = 0;
  double pace_ = 1;  // how many times as long as the cost says passes take here, 1 at least
  dlm_scheduler_stats stats_{};  // under the board's mutex
};

}  // namespace dlm
