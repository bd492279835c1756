// dlm_runtime.hpp: C++17 classes for the C ABI of dlm_runtime.h. The classes consist of inline
// functions that call only the C ABI.
//
// - For each handle of the C ABI, there is a class. Objects of the class can be moved but not
//   copied. A session, scheduler or text keeps its bundle open.
// - A call that fails throws dlm_runtime::Error, with the status and the message.
// - Callbacks are std::function. If a callback throws an exception, its request ends, and the C++
//   call that ran the callback throws the exception again. So exceptions never pass through C code.
// - dlm_runtime.h documents each C function, and says which threads may call it. Text is UTF-8.
// - The namespace is dlm_runtime, because the library itself uses the namespace dlm, and programs
//   may link the library statically.
#ifndef DLM_RUNTIME_HPP
#define DLM_RUNTIME_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dlm_runtime.h"

namespace dlm_runtime {

class Error : public std::runtime_error {
 public:
  Error(dlm_status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  dlm_status status() const noexcept { return status_; }

 private:
  dlm_status status_;
};

// The next three structs are structs of the C ABI, with constructors that set the defaults. Their
// string fields are pointers, and the strings are not copied. Use literals or strings that the
// bundle owns.
struct Policy : dlm_policy {
  Policy() { dlm_policy_init(this, sizeof(dlm_policy)); }
};
struct OpenOptions : dlm_open_options {
  OpenOptions() { dlm_open_options_init(this, sizeof(dlm_open_options)); }
};
struct SchedulerOptions : dlm_scheduler_options {
  SchedulerOptions() { dlm_scheduler_options_init(this, sizeof(dlm_scheduler_options)); }
};

// If a callback returns false, its request ends, and the call that ran the callback throws Error
// with the status DLM_CANCELLED.
using StepFn = std::function<bool(const dlm_step& step)>;
using TextFn = std::function<bool(std::string_view piece)>;
using BeforePassFn = std::function<bool()>;

class Automaton;
class Bundle;

struct Message {
  std::string role, content;
};

// The C++ form of dlm_request. Set at most one of tokens, prompt and chat.
struct Request {
  std::vector<std::int32_t> tokens;
  std::optional<std::string> prompt;
  std::vector<Message> chat;
  bool special_tokens = false;
  // If empty, the request uses the bundle's default preset.
  std::optional<Policy> policy;
  // The largest number of tokens to generate; default: the bundle's max_new_tokens.
  std::int32_t max_new_tokens = DLM_DEFAULT_NEW_TOKENS;
  // The exact number of mask tokens to add, instead of max_new_tokens; 0: max_new_tokens applies.
  std::int64_t new_tokens = 0;
  std::int32_t steps = 0;
  const Automaton* constraint = nullptr;
  std::int32_t constrained_tokens = 0;
  std::int32_t max_steps = 0;
  double deadline_ms = 0;
  std::vector<std::string> stop_strings;
  bool text = false;  // true: Result contains the text. A prompt, a chat or on_text has the same
                      // effect
  StepFn on_step;
  TextFn on_text;                  // called with the text that each step adds
  std::int32_t top_log_probs = 0;  // number of alternative tokens to report for each position
  std::int32_t prefix_group = 0;
};

// A copy of a dlm_result.
struct Result {
  std::vector<std::int32_t> tokens;  // the canvas
  std::string text;
  std::int32_t finish = DLM_FINISH_NONE;
  std::int32_t prompt_tokens = 0;
  std::int32_t completion_tokens = 0;
  std::vector<float> log_probs;         // [canvas length]
  std::vector<std::uint8_t> undecided;  // [canvas length]
  bool is_text_decided = false;
  double constraint_log_prob_loss = 0;  // in nats, see dlm_result
  dlm_stats stats{};
  std::vector<std::int32_t> top_tokens;  // [canvas length, Request::top_log_probs]
  std::vector<float> top_log_probs;      // [canvas length, Request::top_log_probs]
  std::vector<double> option_probs;      // probability of each option, for DLM_CONSTRAINT_DECISIONS
};

namespace detail {

template <class Handle, void (*destroy)(Handle*)>
struct Destroyer {
  void operator()(Handle* handle) const noexcept { destroy(handle); }
};
template <class Handle, void (*destroy)(Handle*)>
using Owned = std::unique_ptr<Handle, Destroyer<Handle, destroy>>;

// Calls a C function with a buffer for the error message. If the C function fails, throws Error.
template <class Call>
void check(Call call) {
  char message[1024];
  const dlm_status status = call(message, sizeof message);
  if (status != DLM_OK) throw Error(status, message);
}

// Like `check`, but for a C function that creates a handle. Returns the new handle.
template <class Handle, class Call>
Handle* made(Call call) {
  Handle* out = nullptr;
  check([&](char* text, std::size_t size) { return call(text, size, &out); });
  return out;
}

// Stores an exception that a callback throws during a C call. After the C call has returned,
// rethrow() throws the exception again.
class Thrown {
 public:
  template <class Function>
  std::int32_t guard(Function function) noexcept {
    try {
      return function() ? 0 : 1;
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      thrown_ = std::current_exception();
      return 1;
    }
  }
  void rethrow() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::exception_ptr thrown = std::exchange(thrown_, nullptr);
    lock.unlock();
    if (thrown) std::rethrow_exception(thrown);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr thrown_;
};

inline std::vector<dlm_message> messages_of(const std::vector<Message>& chat) {
  std::vector<dlm_message> out;
  for (const Message& message : chat)
    out.push_back({message.role.c_str(), message.content.data(), message.content.size()});
  return out;
}

// A dlm_request, together with the memory that its pointers and callbacks refer to. A Prepared
// object must exist until the request has ended.
class Prepared {
 public:
  explicit Prepared(Request request);
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  const dlm_request* get() const noexcept { return &native_; }
  Thrown thrown;

 private:
  bool tell(const dlm_step& step) {
    if (request_.on_text && step.text_size > 0 && !request_.on_text({step.text, step.text_size}))
      return false;
    return !request_.on_step || request_.on_step(step);
  }

  const Request request_;
  const std::vector<dlm_message> messages_;
  std::vector<const char*> stops_;
  dlm_request native_;
};

inline Result result_of(const dlm_result& from) {
  return {{from.tokens, from.tokens + from.length},
          {from.text, from.text_size},
          from.finish,
          from.prompt_tokens,
          from.completion_tokens,
          {from.log_probs, from.log_probs + from.length},
          {from.undecided, from.undecided + from.length},
          from.is_text_decided != 0,
          from.constraint_log_prob_loss,
          *from.stats,
          {from.top_tokens, from.top_tokens + from.length * from.top_count},
          {from.top_log_probs, from.top_log_probs + from.length * from.top_count},
          {from.option_probs, from.option_probs + from.option_count}};
}

}  // namespace detail

// A compiled constraint, which restricts the texts that requests generate.
class Automaton {
 public:
  // The first constructor opens a file that `dlm-export compile` wrote. The second constructor
  // reads the content of such a file.
  explicit Automaton(const std::string& path)
      : Automaton(nullptr, DLM_CONSTRAINT_FILE, path.data(), path.size()) {}
  Automaton(const void* data, std::size_t bytes)
      : Automaton(nullptr, DLM_CONSTRAINT_COMPILED, static_cast<const char*>(data), bytes) {}
  // Compiles a constraint for a bundle's vocabulary. `kind` is one of DLM_CONSTRAINT_..., and says
  // what `content` contains.
  Automaton(const Bundle& bundle, std::int32_t kind, const std::string& content);
  std::int32_t shortest() const { return dlm_automaton_describe(get())->shortest; }
  dlm_automaton* get() const noexcept { return handle_.get(); }

 private:
  Automaton(dlm_bundle* bundle, std::int32_t kind, const char* content, std::size_t bytes)
      : handle_(detail::made<dlm_automaton>([&](char* text, std::size_t size, dlm_automaton** out) {
          dlm_constraint constraint;
          dlm_constraint_init(&constraint, sizeof constraint);
          constraint.kind = kind;
          constraint.content = content;
          constraint.content_size = bytes;
          return dlm_automaton_compile(bundle, &constraint, text, size, out);
        })) {}

  detail::Owned<dlm_automaton, dlm_automaton_destroy> handle_;
};

namespace detail {

inline Prepared::Prepared(Request request)
    : request_(std::move(request)), messages_(messages_of(request_.chat)) {
  dlm_request_init(&native_, sizeof native_);
  native_.tokens = request_.tokens.empty() ? nullptr : request_.tokens.data();
  native_.token_count = request_.tokens.size();
  if (request_.prompt) {
    native_.prompt = request_.prompt->data();
    native_.prompt_size = request_.prompt->size();
  }
  native_.messages = messages_.empty() ? nullptr : messages_.data();
  native_.message_count = messages_.size();
  native_.special_tokens = request_.special_tokens ? 1 : 0;
  native_.policy = request_.policy ? &*request_.policy : nullptr;
  native_.max_new_tokens = request_.max_new_tokens;
  native_.new_tokens = request_.new_tokens;
  native_.steps = request_.steps;
  native_.constraint = request_.constraint == nullptr ? nullptr : request_.constraint->get();
  native_.constrained_tokens = request_.constrained_tokens;
  native_.max_steps = request_.max_steps;
  native_.deadline_ms = request_.deadline_ms;
  native_.top_log_probs = request_.top_log_probs;
  native_.prefix_group = request_.prefix_group;
  for (const std::string& stop : request_.stop_strings) stops_.push_back(stop.c_str());
  native_.stop_strings = stops_.empty() ? nullptr : stops_.data();
  native_.stop_count = stops_.size();
  const bool wants_text = request_.text || request_.prompt || !request_.chat.empty();
  native_.text = request_.on_text ? DLM_TEXT_STEPS : wants_text ? DLM_TEXT_RESULT : DLM_TEXT_NONE;
  if (!request_.on_step && !request_.on_text) return;
  native_.on_step = [](void* user, const dlm_step* step) {
    auto& prepared = *static_cast<Prepared*>(user);
    return prepared.thrown.guard([&] { return prepared.tell(*step); });
  };
  native_.user = this;
}

}  // namespace detail

// A bundle's tokenizer and chat template.
class Text {
 public:
  // Encodes a text. `flags` is a sum of DLM_ENCODE_ values.
  std::vector<std::int32_t> encode(std::string_view string,
                                   std::int32_t flags = DLM_ENCODE_PROMPT) const {
    return ids(
        [&](char* text, std::size_t size, std::vector<std::int32_t>& out, std::size_t* count) {
          return dlm_text_encode(text_, string.data(), string.size(), flags, text, size, out.data(),
                                 out.size(), count);
        });
  }
  std::vector<std::int32_t> encode_chat(const std::vector<Message>& chat,
                                        std::int32_t flags = 0) const {
    const std::vector<dlm_message> messages = detail::messages_of(chat);
    return ids(
        [&](char* text, std::size_t size, std::vector<std::int32_t>& out, std::size_t* count) {
          return dlm_chat_encode(text_, messages.data(), messages.size(), flags, text, size,
                                 out.data(), out.size(), count);
        });
  }
  std::string decode(const std::int32_t* tokens, std::size_t count) const {
    return filled([&](char* text, std::size_t size, std::string& out, std::size_t* bytes) {
      return dlm_text_decode(text_, tokens, count, text, size, out.data(), out.size(), bytes);
    });
  }
  std::string decode(const std::vector<std::int32_t>& tokens) const {
    return decode(tokens.data(), tokens.size());
  }
  std::string render(const std::vector<Message>& chat) const {
    const std::vector<dlm_message> messages = detail::messages_of(chat);
    return filled([&](char* text, std::size_t size, std::string& out, std::size_t* bytes) {
      return dlm_chat_render(text_, messages.data(), messages.size(), text, size, out.data(),
                             out.size(), bytes);
    });
  }
  const dlm_text* get() const noexcept { return text_; }

 private:
  friend class Bundle;
  Text(std::shared_ptr<dlm_bundle> bundle, const dlm_text* text)
      : bundle_(std::move(bundle)), text_(text) {}

  template <class Call>
  static std::vector<std::int32_t> ids(Call call) {
    std::vector<std::int32_t> out;
    std::size_t count = 0;
    do {  // The first call with capacity 0 returns the number of ids. The second call returns the
          // ids.
      out.resize(count);
      detail::check([&](char* text, std::size_t size) { return call(text, size, out, &count); });
    } while (count > out.size());
    return out;
  }

  template <class Call>
  static std::string filled(Call call) {
    std::string out;
    std::size_t bytes = 0;
    do {
      out.resize(bytes);
      detail::check([&](char* text, std::size_t size) { return call(text, size, out, &bytes); });
    } while (bytes > out.size());
    return out;
  }

  std::shared_ptr<dlm_bundle> bundle_;
  const dlm_text* text_;
};

class Bundle {
 public:
  explicit Bundle(const std::string& path, const OpenOptions& options = {})
      : Bundle(detail::made<dlm_bundle>([&](char* text, std::size_t size, dlm_bundle** out) {
          return dlm_bundle_open(path.c_str(), &options, text, size, out);
        })) {}
  explicit Bundle(dlm_bundle* taken)
      : handle_(taken, dlm_bundle_destroy) {}  // this object then owns the handle
  Bundle(Bundle&&) noexcept = default;
  Bundle& operator=(Bundle&&) noexcept = default;

  // Returns the policy of a preset. preset is a name, or NULL for the default preset. effort is
  // NULL or the name of an effort level. A bundle contains effort levels for only one of its
  // presets.
  Policy policy(const char* preset = nullptr, const char* effort = nullptr) const {
    Policy policy;
    detail::check([&](char* text, std::size_t size) {
      return dlm_bundle_policy(get(), preset, effort, text, size, &policy);
    });
    return policy;
  }
  // Loads a prompt cache (a file) that Session::save_prompt_cache wrote with the same bundle. The
  // file must not change as long as the bundle exists.
  void load_prompt_cache(const std::string& path) const {
    detail::check([&](char* text, std::size_t size) {
      return dlm_bundle_load_prompt_cache(get(), path.c_str(), text, size);
    });
  }
  const dlm_denoiser& denoiser() const { return *dlm_bundle_describe(get())->denoiser; }
  std::string_view manifest() const { return dlm_bundle_describe(get())->manifest; }
  std::string_view engine() const { return dlm_bundle_describe(get())->engine; }
  Text text() const {
    const dlm_text* found = nullptr;
    detail::check(
        [&](char* text, std::size_t size) { return dlm_bundle_text(get(), text, size, &found); });
    return {handle_, found};
  }
  dlm_bundle* get() const noexcept { return handle_.get(); }

 private:
  friend class Session;
  friend class Scheduler;
  std::shared_ptr<dlm_bundle> handle_;
};

inline Automaton::Automaton(const Bundle& bundle, std::int32_t kind, const std::string& content)
    : Automaton(bundle.get(), kind, content.data(), content.size()) {}

// Runs requests. Only one thread may use a Session at a time, but any thread may call cancel.
class Session {
 public:
  explicit Session(const Bundle& bundle)
      : bundle_(bundle.handle_),
        asked_(std::make_unique<Asked>()),
        handle_(detail::made<dlm_session>([&](char* text, std::size_t size, dlm_session** out) {
          return dlm_session_create(bundle_.get(), text, size, out);
        })) {}

  Result generate(Request request) {
    detail::Prepared prepared(std::move(request));
    const dlm_result* found = nullptr;
    check(dlm_session_generate(get(), prepared.get(), &found), prepared.thrown);
    return detail::result_of(*found);
  }
  // Runs at most max_batch (1..4096) of the requests at a time. If requests fail, throws the error
  // of the failed request with the lowest index.
  std::vector<Result> generate_batch(std::vector<Request> requests, std::int32_t max_batch = 8) {
    std::vector<std::unique_ptr<detail::Prepared>> prepared;
    std::vector<const dlm_request*> given;
    for (Request& request : requests) {
      prepared.push_back(std::make_unique<detail::Prepared>(std::move(request)));
      given.push_back(prepared.back()->get());
    }
    const dlm_status status =
        dlm_session_generate_batch(get(), given.data(), given.size(), max_batch);
    for (const auto& each : prepared) each->thrown.rethrow();
    detail::Thrown none;
    check(status, none);
    std::vector<Result> results;
    for (std::size_t number = 0; number < given.size(); ++number) results.push_back(result(number));
    return results;
  }
  // start() begins a request. Each call of step() then runs one pass, and returns a step. This step
  // is valid until the next call on the session.
  void start(Request request) {
    started_ = std::make_unique<detail::Prepared>(std::move(request));
    check(dlm_session_start(get(), started_->get()), started_->thrown);
  }
  const dlm_step& step() {
    const dlm_step* out = nullptr;
    detail::Thrown none;
    check(dlm_session_step(get(), &out), started_ ? started_->thrown : none);
    return *out;
  }
  // Returns the result of a request that has ended. Throws Error if the request failed.
  Result result(std::size_t number = 0) const {
    const dlm_result* found = nullptr;
    const dlm_status status = dlm_session_result(get(), number, &found);
    if (status != DLM_OK) throw Error(status, dlm_session_last_error(get()));
    if (found->status != DLM_OK) throw Error(found->status, found->message);
    return detail::result_of(*found);
  }
  // Sets the function that the session calls before every pass. To remove it, pass an empty
  // function.
  void before_pass(BeforePassFn function) {
    asked_->function = std::move(function);
    const dlm_before_pass_fn ask = [](void* user) {
      auto& asked = *static_cast<Asked*>(user);
      return asked.thrown.guard(asked.function);
    };
    detail::Thrown none;
    check(dlm_session_before_pass(get(), asked_->function ? ask : nullptr, asked_.get()), none);
  }
  // Sets the largest number of bytes of keys and values that the session keeps between calls. Later
  // requests reuse them if their prompts start with the same tokens.
  void prefix_cache(std::uint64_t bytes) {
    detail::Thrown none;
    check(dlm_session_prefix_cache(get(), bytes), none);
  }
  // Computes the keys and values of a prompt, and writes them to a file. Returns the number of
  // tokens that the file contains.
  std::size_t save_prompt_cache(const std::vector<std::int32_t>& tokens, const std::string& path) {
    std::size_t saved = 0;
    detail::Thrown none;
    check(dlm_session_save_prompt_cache(get(), tokens.data(), tokens.size(), path.c_str(), &saved),
          none);
    return saved;
  }
  void cancel(std::size_t number = DLM_ALL_REQUESTS) noexcept {  // any thread may call cancel
    dlm_session_cancel(get(), number);
  }
  dlm_session* get() const noexcept { return handle_.get(); }

 private:
  struct Asked {
    BeforePassFn function;
    detail::Thrown thrown;
  };

  void check(dlm_status status, detail::Thrown& thrown) {
    thrown.rethrow();
    asked_->thrown.rethrow();
    if (status != DLM_OK) throw Error(status, dlm_session_last_error(get()));
  }
  std::shared_ptr<dlm_bundle> bundle_;
  std::unique_ptr<Asked> asked_;
  std::unique_ptr<detail::Prepared> started_;
  detail::Owned<dlm_session, dlm_session_destroy> handle_;  // the member that is destroyed first
};

namespace detail {

// A request that was submitted to a scheduler, together with the objects that its callbacks use.
struct Handed {
  explicit Handed(Request request) : prepared(std::move(request)) {}

  Prepared prepared;
  Owned<dlm_job, dlm_job_destroy> job;  // the member that is destroyed first
};

// Keeps the objects of requests whose Job was destroyed before the request had ended. The current
// pass may still use these objects.
class Orphans {
 public:
  void take(std::unique_ptr<Handed> one) {
    dlm_job_cancel(one->job.get());
    const std::lock_guard<std::mutex> lock(mutex_);
    list_.push_back(std::move(one));
    sweep();
  }
  void sweep_locked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    sweep();
  }

 private:
  void sweep() {
    const auto is_done = [](const std::unique_ptr<Handed>& one) {
      return dlm_job_wait(one->job.get(), 0) != 0;
    };
    list_.erase(std::remove_if(list_.begin(), list_.end(), is_done), list_.end());
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Handed>> list_;
};

}  // namespace detail

// A request that was submitted to a scheduler. A Job may outlive the scheduler. Destroying a Job
// before its request has ended cancels the request.
class Job {
 public:
  Job(Job&&) noexcept = default;
  Job& operator=(Job&& other) noexcept {
    std::swap(handed_, other.handed_);
    std::swap(orphans_, other.orphans_);
    return *this;
  }
  ~Job() {
    if (handed_ && !wait(0)) orphans_->take(std::move(handed_));
  }

  // Waits until the request has ended, but at most for timeout_ms milliseconds. If timeout_ms is
  // below 0, there is no time limit. Returns true if the request has ended.
  bool wait(double timeout_ms = -1) const { return dlm_job_wait(get(), timeout_ms) != 0; }
  void cancel() noexcept { dlm_job_cancel(get()); }  // any thread may call this function

  // Returns the result of the request, which must have ended. If the request failed, throws Error.
  Result result() const {
    const dlm_result* found = nullptr;
    const dlm_status status = dlm_job_result(get(), &found);
    if (found == nullptr) throw Error(status, "the job has not ended: wait for it");
    handed_->prepared.thrown.rethrow();
    if (status != DLM_OK) throw Error(status, found->message);
    return detail::result_of(*found);
  }
  dlm_job* get() const noexcept { return handed_->job.get(); }

 private:
  friend class Scheduler;
  Job(std::unique_ptr<detail::Handed> handed, std::shared_ptr<detail::Orphans> orphans)
      : handed_(std::move(handed)), orphans_(std::move(orphans)) {}

  std::unique_ptr<detail::Handed> handed_;
  std::shared_ptr<detail::Orphans> orphans_;
};

// Accepts requests from any thread. One thread of the program runs all passes, in run().
class Scheduler {
 public:
  explicit Scheduler(const Bundle& bundle, const SchedulerOptions& options = {})
      : bundle_(bundle.handle_),
        orphans_(std::make_shared<detail::Orphans>()),
        handle_(detail::made<dlm_scheduler>([&](char* text, std::size_t size, dlm_scheduler** out) {
          return dlm_scheduler_create(bundle_.get(), &options, text, size, out);
        })) {}

  // Submits a request. The thread in run() calls the callbacks of the request. If a callback throws
  // an exception, the request ends, and Job::result throws the exception again.
  Job submit(Request request) {
    orphans_->sweep_locked();
    auto handed = std::make_unique<detail::Handed>(std::move(request));
    handed->job.reset(detail::made<dlm_job>([&](char* text, std::size_t size, dlm_job** out) {
      return dlm_scheduler_submit(get(), handed->prepared.get(), text, size, out);
    }));
    return {std::move(handed), orphans_};
  }
  // Runs passes on this thread until stop() is called. If until_idle is true, also returns when no
  // request remains.
  void run(bool until_idle = false, const BeforePassFn& before_pass = {}) {
    struct Asked {
      const BeforePassFn& function;
      detail::Thrown thrown;
    } asked{before_pass, {}};
    const dlm_before_pass_fn ask = [](void* user) {
      auto& found = *static_cast<Asked*>(user);
      return found.thrown.guard(found.function);
    };
    char message[1024];
    const dlm_status status = dlm_scheduler_run(get(), until_idle, before_pass ? ask : nullptr,
                                                &asked, message, sizeof message);
    asked.thrown.rethrow();
    if (status != DLM_OK) throw Error(status, message);
  }
  void stop() noexcept { dlm_scheduler_stop(get()); }  // any thread may call this function
  dlm_scheduler_stats stats() const {
    dlm_scheduler_stats out;
    dlm_scheduler_get_stats(get(), &out, sizeof out);
    return out;
  }
  dlm_scheduler* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<dlm_bundle> bundle_;
  std::shared_ptr<detail::Orphans> orphans_;  // destroyed after handle_
  detail::Owned<dlm_scheduler, dlm_scheduler_destroy> handle_;
};

}  // namespace dlm_runtime

#endif  // DLM_RUNTIME_HPP
