// An instance of a model. It has a scheduler and three kinds of threads:
//
// - One thread runs the passes of the scheduler.
// - One thread sends all responses, and cancels the requests that clients have cancelled.
// - Two threads compile new constraints, so that other requests do not wait for them.
//
// Triton calls start() on one of its own threads. start() returns before the request has ended.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "metrics.h"
#include "model.h"

namespace dlm::triton {

class Instance {
 public:
  // Starts the threads. The model must outlive the instance. Throws an Error if this fails.
  Instance(TRITONBACKEND_ModelInstance* instance, Model& model);

  // Cancels the requests that have not ended, sends their responses, and ends the threads.
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  // Starts a request, and later sends its responses and releases it.
  void start(TRITONBACKEND_Request* request) noexcept;

 private:
  struct Answer;
  struct Step;

  void start_threads();
  void stop();
  static int32_t on_step(void* user, const dlm_step* step);
  void add_step(Answer& answer, const dlm_step& step);
  void compile_all();
  void submit(const std::shared_ptr<Answer>& answer) noexcept;
  void submit_or_throw(const std::shared_ptr<Answer>& answer);
  void reply();
  void send_ready();
  void cancel_abandoned();
  void send_result(Answer& answer) noexcept;
  static Tensors read_result(const Answer& answer);
  void end(Answer& answer, bool is_good) noexcept;
  void wake() const;

  TRITONBACKEND_ModelInstance* const instance_;
  Model& model_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<dlm_scheduler, Destroy> scheduler_;
  int ended_ = -1;  // an eventfd; the scheduler and wake() write to it

  std::mutex mutex_;  // protects the members from to_compile_ to is_last_round_
  std::condition_variable has_work_;
  std::deque<std::shared_ptr<Answer>> to_compile_;
  std::list<std::shared_ptr<Answer>> running_;  // requests that have a job
  std::vector<Step> steps_;
  bool is_closing_ = false;     // true: compiler threads end when to_compile_ is empty
  bool is_last_round_ = false;  // true: the scheduler is being destroyed, so there will be no new
                                // jobs

  std::vector<std::thread> compilers_;
  std::thread runner_, replier_;
};

}  // namespace dlm::triton
