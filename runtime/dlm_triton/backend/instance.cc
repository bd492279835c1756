#include "instance.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace dlm::triton {
namespace {

constexpr int kCompilers = 2;
constexpr int kCancelCheckMs = 20;

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

const char* name_of(int32_t finish) {
  switch (finish) {
    case DLM_FINISH_STOP:
      return "stop";
    case DLM_FINISH_LENGTH:
      return "length";
    case DLM_FINISH_STEPS:
      return "steps";
    case DLM_FINISH_DEADLINE:
      return "deadline";
    case DLM_FINISH_CONSTRAINT:
      return "constraint";
    default:
      return "unknown";
  }
}

}  // namespace

// A request of Triton. It exists from the call of start() until its last response.
struct Instance::Answer : std::enable_shared_from_this<Instance::Answer> {
  Instance* instance = nullptr;
  TRITONBACKEND_Request* request = nullptr;
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  Asked asked;
  bool streams = false;
  std::shared_ptr<dlm_automaton> constraint;
  std::unique_ptr<dlm_job, Destroy> job;
  size_t sent = 0;  // bytes of the text that were sent
  uint64_t began_ns = 0, submitted_ns = 0;

  ~Answer() {
    if (factory != nullptr) log_error(TRITONBACKEND_ResponseFactoryDelete(factory));
  }
};

// A response before the last one.
struct Instance::Step {
  std::shared_ptr<Answer> answer;
  Tensors tensors;  // until the response is sent, output_ids contains the whole canvas, and
                    // prompt_tokens is not set
};

Instance::Instance(TRITONBACKEND_ModelInstance* instance, Model& model)
    : instance_(instance), model_(model) {
  const char* name = nullptr;
  check(TRITONBACKEND_ModelInstanceName(instance, &name));
  metrics_ = std::make_unique<Metrics>(model.name(), model.version(), name);
  ended_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (ended_ < 0) fail(DLM_OUT_OF_MEMORY, "too many files are open: raise ulimit -n");
  dlm_scheduler_options options;
  dlm_scheduler_options_init(&options, sizeof options);
  options.max_running = model.max_running();
  options.max_waiting = model.max_waiting();
  options.ended_fd = ended_;
  char message[1024] = "";
  dlm_scheduler* scheduler = nullptr;
  const dlm_status status =
      dlm_scheduler_create(model.bundle(), &options, message, sizeof message, &scheduler);
  if (status != DLM_OK) {
    close(ended_);
    throw Error(status, message);
  }
  scheduler_.reset(scheduler);
  try {
    start_threads();
  } catch (...) {
    stop();
    throw;
  }
}

void Instance::start_threads() {
  runner_ = std::thread([this] {
    char why[1024] = "";
    // If the call fails, all requests have ended with the error. Call it again for new requests.
    while (dlm_scheduler_run(scheduler_.get(), 0, nullptr, nullptr, why, sizeof why) != DLM_OK)
      log_error(TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, why));
  });
  replier_ = std::thread([this] { reply(); });
  for (int i = 0; i < kCompilers; ++i) compilers_.emplace_back([this] { compile_all(); });
}

Instance::~Instance() { stop(); }

void Instance::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  has_work_.notify_all();
  for (std::thread& each : compilers_) each.join();
  dlm_scheduler_stop(scheduler_.get());
  if (runner_.joinable()) runner_.join();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_last_round_ = true;
  }
  scheduler_.reset();  // ends all jobs
  wake();
  if (replier_.joinable()) replier_.join();
  close(ended_);
}

void Instance::wake() const {
  const uint64_t one = 1;
  // If the write fails, the counter of the eventfd is at its maximum, so the replier thread wakes
  // anyway.
  if (write(ended_, &one, sizeof one) < 0) return;
}

void Instance::start(TRITONBACKEND_Request* request) noexcept {
  std::shared_ptr<Answer> answer;
  try {
    answer = std::make_shared<Answer>();
    answer->instance = this;
    answer->request = request;
    answer->began_ns = answer->submitted_ns = now_ns();
    check(TRITONBACKEND_ResponseFactoryNew(&answer->factory, request));
    answer->asked = read_request(request);
    answer->streams = answer->asked.streams && model_.is_decoupled();
    if (answer->asked.constraint_kind >= 0) {
      answer->constraint = model_.find_constraint(answer->asked);
      if (answer->constraint == nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (to_compile_.size() >= static_cast<size_t>(model_.max_waiting()))
          fail(DLM_BUSY, "%zu requests wait until their constraints are compiled: try again",
               to_compile_.size());
        to_compile_.push_back(answer);
        has_work_.notify_one();
        return;
      }
    }
  } catch (...) {
    const Failure failure = thrown();
    if (answer == nullptr || answer->factory == nullptr) {
      log_error(error_of(failure));
      log_error(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
      return;
    }
    send_failure(answer->factory, failure);
    return end(*answer, false);
  }
  submit(answer);
}

void Instance::compile_all() {
  for (;;) {
    std::shared_ptr<Answer> answer;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_work_.wait(lock, [this] { return is_closing_ || !to_compile_.empty(); });
      if (to_compile_.empty()) return;
      answer = std::move(to_compile_.front());
      to_compile_.pop_front();
    }
    try {
      bool is_cancelled = false;
      check(TRITONBACKEND_RequestIsCancelled(answer->request, &is_cancelled));
      if (is_cancelled) fail(DLM_CANCELLED, "the request was cancelled");
      answer->constraint = model_.compile_constraint(answer->asked);
    } catch (...) {
      send_failure(answer->factory, thrown());
      end(*answer, false);
      continue;
    }
    submit(answer);
  }
}

void Instance::submit(const std::shared_ptr<Answer>& answer) noexcept {
  try {
    submit_or_throw(answer);
  } catch (...) {
    send_failure(answer->factory, thrown());
    end(*answer, false);
  }
}

void Instance::submit_or_throw(const std::shared_ptr<Answer>& answer) {
  const Asked& asked = answer->asked;
  char message[1024] = "";
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy);
  dlm_status status = dlm_bundle_policy(
      model_.bundle(), asked.preset.empty() ? nullptr : asked.preset.c_str(),
      asked.effort.empty() ? nullptr : asked.effort.c_str(), message, sizeof message, &policy);
  if (status != DLM_OK) throw Error(status, message);
  for (const size_t index : asked.changed) copy_field(index, asked.policy, policy);

  dlm_request request;
  dlm_request_init(&request, sizeof request);
  std::vector<dlm_message> messages;
  if (asked.input == Asked::Input::ids) {
    request.tokens = asked.ids.data();
    request.token_count = asked.ids.size();
  } else if (asked.input == Asked::Input::text) {
    request.prompt = asked.text.data();
    request.prompt_size = asked.text.size();
  } else {
    for (const auto& [role, content] : asked.messages)
      messages.push_back({role.c_str(), content.data(), content.size()});
    request.messages = messages.data();
    request.message_count = messages.size();
  }
  std::vector<const char*> stops;
  for (const std::string& each : asked.stop_strings) stops.push_back(each.c_str());
  request.special_tokens = asked.has_special_tokens;
  request.max_new_tokens = asked.max_new_tokens;
  request.new_tokens = asked.new_tokens;
  request.policy = &policy;
  request.steps = asked.steps;
  request.max_steps = asked.max_steps;
  request.prefix_group = asked.prefix_group;
  request.deadline_ms = asked.deadline_ms;
  if (asked.deadline_ms > 0) {  // the deadline includes the time to compile the constraint
    const double waited_ms = static_cast<double>(now_ns() - answer->began_ns) / 1e6;
    request.deadline_ms = std::max(asked.deadline_ms - waited_ms, 1e-3);
  }
  request.constraint = answer->constraint.get();
  request.stop_strings = stops.empty() ? nullptr : stops.data();
  request.stop_count = stops.size();
  if (model_.has_text()) request.text = answer->streams ? DLM_TEXT_STEPS : DLM_TEXT_RESULT;
  if (answer->streams) request.on_step = on_step;
  request.user = answer.get();

  answer->submitted_ns = now_ns();
  // Allocate this list before the request is submitted. If a later allocation failed, the answer
  // would be freed while the job still refers to the answer.
  std::list<std::shared_ptr<Answer>> added{answer};
  dlm_job* job = nullptr;
  status = dlm_scheduler_submit(scheduler_.get(), &request, message, sizeof message, &job);
  if (status != DLM_OK) throw Error(status, message);
  answer->job.reset(job);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.splice(running_.end(), added);
  }
  wake();  // the job may have ended before it was added to running_
}

// Copies a step for the replier thread. This function does not send responses, because it must not
// delay the thread that runs the passes.
int32_t Instance::on_step(void* user, const dlm_step* step) {
  if (step->done) return 0;
  auto& answer = *static_cast<Answer*>(user);
  try {
    answer.instance->add_step(answer, *step);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

void Instance::add_step(Answer& answer, const dlm_step& step) {
  Step made;
  made.answer = answer.shared_from_this();
  made.tensors.text.assign(step.text, step.text_size);
  made.tensors.nfe = step.nfe;
  made.tensors.prompt_tokens = step.prompt_tokens;
  made.tensors.output_ids.resize(static_cast<size_t>(step.length));
  for (size_t i = 0; i < made.tensors.output_ids.size(); ++i)
    made.tensors.output_ids[i] = step.undecided[i] ? -1 : step.canvas[i];
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_.push_back(std::move(made));
  }
  wake();
}

void Instance::reply() {
  for (;;) {
    int timeout_ms = kCancelCheckMs;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (running_.empty() && steps_.empty()) {
        if (is_last_round_) return;
        timeout_ms = -1;
      }
    }
    pollfd waiting = {ended_, POLLIN, 0};
    poll(&waiting, 1, timeout_ms);
    uint64_t count = 0;
    const bool has_news = read(ended_, &count, sizeof count) > 0;
    if (has_news) send_ready();
    cancel_abandoned();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_news && !is_last_round_) metrics_->update(scheduler_.get());
  }
}

void Instance::send_ready() {
  std::vector<Step> steps;
  std::list<std::shared_ptr<Answer>> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Find the ended jobs before taking steps_. All steps of an ended job are then in steps_, so
    // they are sent before its result.
    for (auto next = running_.begin(); next != running_.end();) {
      const auto each = next++;
      if (dlm_job_wait((*each)->job.get(), 0) != 0) ended.splice(ended.end(), running_, each);
    }
    steps.swap(steps_);
  }
  for (Step& each : steps) {
    Answer& answer = *each.answer;
    Tensors& tensors = each.tensors;
    answer.sent += tensors.text.size();
    auto& ids = tensors.output_ids;
    if (answer.asked.max_new_tokens != 0)
      ids.erase(ids.begin(), ids.begin() + tensors.prompt_tokens);
    tensors.completion_tokens = static_cast<int32_t>(
        std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; }));
    send_tensors(answer.factory, answer.asked.outputs, tensors, false);
  }
  for (const auto& each : ended) send_result(*each);
}

void Instance::cancel_abandoned() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : running_) {
    bool is_cancelled = false;
    TRITONSERVER_Error* const error =
        TRITONBACKEND_RequestIsCancelled(each->request, &is_cancelled);
    if (error != nullptr)
      TRITONSERVER_ErrorDelete(error);
    else if (is_cancelled)
      dlm_job_cancel(each->job.get());
  }
}

void Instance::send_result(Answer& answer) noexcept {
  Tensors tensors;
  try {
    tensors = read_result(answer);
  } catch (...) {
    send_failure(answer.factory, thrown());
    return end(answer, false);
  }
  metrics_->add_tokens(tensors.completion_tokens);
  send_tensors(answer.factory, answer.asked.outputs, tensors, true);
  end(answer, true);
}

Tensors Instance::read_result(const Answer& answer) {
  const dlm_result* result = nullptr;
  const dlm_status status = dlm_job_result(answer.job.get(), &result);
  if (status != DLM_OK) throw Error(status, result->message);
  if (result->finish == DLM_FINISH_CANCELLED) fail(DLM_CANCELLED, "the request was cancelled");
  Tensors tensors;
  const size_t start =
      answer.asked.max_new_tokens == 0 ? 0 : static_cast<size_t>(result->prompt_tokens);
  tensors.text.assign(result->text, result->text_size);
  tensors.text.erase(0, answer.sent);
  tensors.output_ids.assign(result->tokens + start, result->tokens + result->length);
  tensors.nfe = result->stats->nfe;
  tensors.finish = name_of(result->finish);
  tensors.prompt_tokens = result->prompt_tokens;
  tensors.completion_tokens = result->completion_tokens;
  return tensors;
}

// Reports the statistics of a request whose last response was sent, and releases the request.
void Instance::end(Answer& answer, bool is_good) noexcept {
  const uint64_t now = now_ns();
  log_error(TRITONBACKEND_ModelInstanceReportStatistics(
      instance_, answer.request, is_good, answer.began_ns, answer.submitted_ns, now, now));
  if (is_good)
    log_error(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance_, 1, answer.began_ns,
                                                               answer.submitted_ns, now, now));
  if (answer.factory != nullptr) log_error(TRITONBACKEND_ResponseFactoryDelete(answer.factory));
  answer.factory = nullptr;
  log_error(TRITONBACKEND_RequestRelease(answer.request, TRITONSERVER_REQUEST_RELEASE_ALL));
  answer.request = nullptr;
}

}  // namespace dlm::triton
