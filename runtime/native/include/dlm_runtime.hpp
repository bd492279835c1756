// dlm_runtime.hpp: the C ABI of dlm_runtime.h for C++17. Header only: what it compiles to calls the
// C ABI alone.
//
// - Handles are classes that move and do not copy. A session, scheduler, job or text keeps its
// bundle open.
// - What fails throws dlm_runtime::Error, with the status and the sentence.
// - Callbacks are std::function. What one throws ends its request, and comes out of the call that
// it ran in: no exception goes
//   through C.
// - Threads, and what each call does, are as dlm_runtime.h says. Text is UTF-8.
// - The namespace is not `dlm`, which is the library's own: a program may link it statically.
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

// The structs of C, which set themselves up. Strings in them are borrowed: literals, or a bundle's
// own.
struct Policy : dlm_policy {
  Policy() { dlm_policy_init(this); }
};
struct OpenOptions : dlm_open_options {
  OpenOptions() { dlm_open_options_init(this); }
};
struct SchedulerOptions : dlm_scheduler_options {
  SchedulerOptions() { dlm_scheduler_options_init(this); }
};

// A callback that returns false ends its request, and the call throws Error with DLM_CANCELLED.
using StepFn = std::function<bool(const dlm_step& step)>;
using TextFn = std::function<bool(std::string_view delta)>;
using BeforePassFn = std::function<bool()>;

// dlm_generate_options. GenerateOptions{} has its defaults.
struct GenerateOptions {
  std::optional<Policy> policy;                          // none: the bundle's default preset
  std::int32_t max_new_tokens = DLM_DEFAULT_NEW_TOKENS;  // the bundle's own number
  std::int32_t steps = 0;
  std::int32_t max_steps = 0;
  bool special_tokens = false;
  double deadline_ms = 0;
  StepFn on_step;
};

struct Message {
  std::string role, content;
};

// dlm_result, copied.
struct Result {
  std::int32_t finish = DLM_FINISH_NONE;
  std::int32_t nfe = 0;
  std::int32_t prompt_tokens = 0;
  std::int32_t completion_tokens = 0;
  std::vector<float> log_probs;         // [canvas length]
  std::vector<std::uint8_t> undecided;  // [canvas length]
  double constraint_log_prob_loss = 0;  // nats
};

namespace detail {

template <class Handle, void (*destroy)(Handle*)>
struct Destroyer {
  void operator()(Handle* handle) const noexcept { destroy(handle); }
};
template <class Handle, void (*destroy)(Handle*)>
using Owned = std::unique_ptr<Handle, Destroyer<Handle, destroy>>;

// Calls a function of C that takes a message's buffer, and throws what it says.
template <class Call>
void check(Call call) {
  char message[1024];
  const dlm_status status = call(message, sizeof message);
  if (status != DLM_OK) throw Error(status, message);
}

// The same for a function that makes a handle.
template <class Handle, class Call>
Handle* made(Call call) {
  Handle* out = nullptr;
  check([&](char* text, std::size_t size) { return call(text, size, &out); });
  return out;
}

// What callbacks of one call threw: kept while C runs, thrown when it is back.
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

// Functions that a request calls, where C finds them; they outlive it.
struct Callbacks {
  StepFn on_step;
  TextFn on_text;
  Thrown thrown;
};

inline dlm_generate_options options_of(const GenerateOptions& from, Callbacks& callbacks) {
  dlm_generate_options options;
  dlm_generate_options_init(&options);
  options.policy = from.policy ? &*from.policy : nullptr;
  options.max_new_tokens = from.max_new_tokens;
  options.steps = from.steps;
  options.max_steps = from.max_steps;
  options.special_tokens = from.special_tokens;
  options.deadline_ms = from.deadline_ms;
  if (callbacks.on_step) {
    options.on_step = [](void* user, const dlm_step* step) {
      auto& found = *static_cast<Callbacks*>(user);
      return found.thrown.guard([&] { return found.on_step(*step); });
    };
    options.user = &callbacks;
  }
  return options;
}

inline std::vector<dlm_message> messages_of(const std::vector<Message>& chat) {
  std::vector<dlm_message> out;
  for (const Message& message : chat)
    out.push_back({message.role.c_str(), message.content.data(), message.content.size()});
  return out;
}

inline Result result_of(const dlm_result& from) {
  return {from.finish,
          from.nfe,
          from.prompt_tokens,
          from.completion_tokens,
          {from.log_probs, from.log_probs + from.length},
          {from.undecided, from.undecided + from.length},
          from.constraint_log_prob_loss};
}

}  // namespace detail

// What a request's text may be.
class Automaton {
 public:
  explicit Automaton(const std::string& path)
      : handle_(detail::made<dlm_automaton>([&](char* text, std::size_t size, dlm_automaton** out) {
          return dlm_automaton_open(path.c_str(), text, size, out);
        })) {}
  Automaton(const void* data, std::size_t bytes)
      : handle_(detail::made<dlm_automaton>([&](char* text, std::size_t size, dlm_automaton** out) {
          return dlm_automaton_read(data, bytes, text, size, out);
        })) {}
  std::int32_t shortest() const { return dlm_automaton_shortest(get()); }
  dlm_automaton* get() const noexcept { return handle_.get(); }

 private:
  detail::Owned<dlm_automaton, dlm_automaton_destroy> handle_;
};

// A bundle's tokenizer and chat template.
class Text {
 public:
  // flags: DLM_ENCODE_ values, added.
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
    do {  // once for the size, once for the ids
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
      : handle_(taken, dlm_bundle_destroy) {}  // such as dlm_bundle_from_callback's
  Bundle(Bundle&&) noexcept = default;
  Bundle& operator=(Bundle&&) noexcept = default;

  Policy preset(const char* name = nullptr) const {
    Policy policy;
    detail::check([&](char* text, std::size_t size) {
      return dlm_bundle_preset(get(), name, text, size, &policy);
    });
    return policy;
  }
  Policy effort(const char* level) const {
    Policy policy;
    detail::check([&](char* text, std::size_t size) {
      return dlm_bundle_effort(get(), level, text, size, &policy);
    });
    return policy;
  }
  dlm_denoiser denoiser() const {
    dlm_denoiser out;
    dlm_bundle_denoiser(get(), &out);
    return out;
  }
  std::string_view manifest() const { return dlm_bundle_manifest(get()); }
  std::string_view engine() const { return dlm_bundle_engine(get()); }
  std::int32_t max_new_tokens() const { return dlm_bundle_max_new_tokens(get()); }
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

// Requests of one thread at a time; cancel may come from any.
class Session {
 public:
  explicit Session(const Bundle& bundle)
      : bundle_(bundle.handle_),
        asked_(std::make_unique<Asked>()),
        handle_(detail::made<dlm_session>([&](char* text, std::size_t size, dlm_session** out) {
          return dlm_session_create(bundle_.get(), text, size, out);
        })) {}

  // The canvas behind the given tokens, these included.
  std::vector<std::int32_t> generate(std::vector<std::int32_t> tokens,
                                     const GenerateOptions& options) {
    detail::Callbacks callbacks{options.on_step, {}, {}};
    const dlm_generate_options given = detail::options_of(options, callbacks);
    const std::size_t count = tokens.size();
    dlm_denoiser denoiser;
    dlm_bundle_denoiser(bundle_.get(),
                        &denoiser);  // no longer canvas is accepted, whatever is asked for
    const std::int32_t wanted = options.max_new_tokens == DLM_DEFAULT_NEW_TOKENS
                                    ? dlm_bundle_max_new_tokens(bundle_.get())
                                    : options.max_new_tokens;
    tokens.resize(count +
                  static_cast<std::size_t>(std::clamp(wanted, 0, denoiser.max_canvas_length)));
    std::size_t length = 0;
    check(
        dlm_session_generate(get(), &given, tokens.data(), count, tokens.size(), nullptr, &length),
        callbacks.thrown);
    tokens.resize(length);
    return tokens;
  }
  std::string generate_text(std::string_view prompt, const GenerateOptions& options,
                            TextFn on_text = {}) {
    return told(options, std::move(on_text),
                [&](const dlm_generate_options& given, dlm_text_fn function, void* user,
                    const char** text, std::size_t* size) {
                  return dlm_generate_text(get(), &given, prompt.data(), prompt.size(), function,
                                           user, text, size);
                });
  }
  std::string generate_chat(const std::vector<Message>& chat, const GenerateOptions& options,
                            TextFn on_text = {}) {
    const std::vector<dlm_message> messages = detail::messages_of(chat);
    return told(options, std::move(on_text),
                [&](const dlm_generate_options& given, dlm_text_fn function, void* user,
                    const char** text, std::size_t* size) {
                  return dlm_generate_chat(get(), &given, messages.data(), messages.size(),
                                           function, user, text, size);
                });
  }
  // A step at a time; options.on_step is not called. The step's pointers are valid until the next
  // call.
  void start(const std::vector<std::int32_t>& tokens, const GenerateOptions& options) {
    detail::Callbacks none;
    const dlm_generate_options given = detail::options_of(options, none);
    check(dlm_session_start(get(), &given, tokens.data(), tokens.size()), none.thrown);
  }
  dlm_step step() {
    dlm_step out{};
    detail::Thrown none;
    check(dlm_session_step(get(), &out), none);
    return out;
  }

  Result result() const {
    dlm_result found;
    const dlm_status status = dlm_session_result(get(), 0, &found);
    if (status != DLM_OK) throw Error(status, dlm_session_last_error(get()));
    return detail::result_of(found);
  }
  dlm_stats stats() const {
    dlm_stats out{};
    dlm_session_stats(get(), &out);
    return out;
  }
  // Of the requests that start from now on; `given` as of dlm_session_constrain_from.
  void constrain(const Automaton& automaton, std::int32_t given = 0) {
    detail::Thrown none;
    check(dlm_session_constrain_from(get(), automaton.get(), given), none);
  }
  void unconstrain() {
    detail::Thrown none;
    check(dlm_session_constrain(get(), nullptr), none);
  }
  // Asked before every pass; an empty function: nobody is.
  void before_pass(BeforePassFn function) {
    asked_->function = std::move(function);
    const dlm_before_pass_fn ask = [](void* user) {
      auto& asked = *static_cast<Asked*>(user);
      return asked.thrown.guard(asked.function);
    };
    detail::Thrown none;
    check(dlm_session_before_pass(get(), asked_->function ? ask : nullptr, asked_.get()), none);
  }
  void cancel() noexcept { dlm_session_cancel(get(), 0); }  // from any thread
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
  template <class Call>
  std::string told(const GenerateOptions& options, TextFn on_text, Call call) {
    detail::Callbacks callbacks{options.on_step, std::move(on_text), {}};
    const dlm_generate_options given = detail::options_of(options, callbacks);
    const dlm_text_fn function = [](void* user, const char* delta, std::size_t size) {
      auto& found = *static_cast<detail::Callbacks*>(user);
      return found.thrown.guard([&] { return found.on_text({delta, size}); });
    };
    const char* text = nullptr;
    std::size_t size = 0;
    check(call(given, callbacks.on_text ? function : nullptr, &callbacks, &text, &size),
          callbacks.thrown);
    return {text, size};
  }

  std::shared_ptr<dlm_bundle> bundle_;
  std::unique_ptr<Asked> asked_;
  detail::Owned<dlm_session, dlm_session_destroy> handle_;  // goes first
};

namespace detail {

// A request of a scheduler with what its steps call.
struct Handed {
  Callbacks callbacks;
  Owned<dlm_job, dlm_job_destroy> job;  // goes first
};

// Requests whose job went before they were done: a pass that is being made may still call what they
// hold.
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

// A request that was handed to a scheduler, which it may outlive. One that goes before it is done
// is cancelled.
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

  // Whether it is done, after waiting so long; below 0: as long as it takes.
  bool wait(double timeout_ms = -1) const { return dlm_job_wait(get(), timeout_ms) != 0; }
  void cancel() noexcept { dlm_job_cancel(get()); }  // from any thread

  // Of a job that is done. Throws why it failed.
  Result result() const {
    dlm_result found;
    const dlm_status status = dlm_job_result(get(), &found);
    if (wait(0)) handed_->callbacks.thrown.rethrow();
    if (status != DLM_OK)
      throw Error(status, wait(0) ? dlm_job_message(get()) : "the job is not done: wait for it");
    return detail::result_of(found);
  }
  std::vector<std::int32_t> tokens() const {
    std::size_t length = 0;
    const std::int32_t* const found = dlm_job_tokens(get(), &length);
    return {found, found + length};
  }
  dlm_job* get() const noexcept { return handed_->job.get(); }

 private:
  friend class Scheduler;
  Job(std::unique_ptr<detail::Handed> handed, std::shared_ptr<detail::Orphans> orphans)
      : handed_(std::move(handed)), orphans_(std::move(orphans)) {}

  std::unique_ptr<detail::Handed> handed_;
  std::shared_ptr<detail::Orphans> orphans_;
};

// Requests that any number of threads hand in, and one thread makes the passes of.
class Scheduler {
 public:
  explicit Scheduler(const Bundle& bundle, const SchedulerOptions& options = {})
      : bundle_(bundle.handle_),
        orphans_(std::make_shared<detail::Orphans>()),
        handle_(detail::made<dlm_scheduler>([&](char* text, std::size_t size, dlm_scheduler** out) {
          return dlm_scheduler_create(bundle_.get(), &options, text, size, out);
        })) {}

  // options.on_step is called on the thread that makes the passes. What it throws ends the request,
  // and Job::result throws it.
  Job submit(const std::vector<std::int32_t>& tokens, const GenerateOptions& options,
             const Automaton* automaton = nullptr, std::int32_t given = 0) {
    orphans_->sweep_locked();
    auto handed = std::make_unique<detail::Handed>();
    handed->callbacks.on_step = options.on_step;
    const dlm_generate_options chosen = detail::options_of(options, handed->callbacks);
    handed->job.reset(detail::made<dlm_job>([&](char* text, std::size_t size, dlm_job** out) {
      return dlm_scheduler_submit(get(), &chosen, automaton == nullptr ? nullptr : automaton->get(),
                                  given, tokens.data(), tokens.size(), text, size, out);
    }));
    return {std::move(handed), orphans_};
  }
  // Makes passes on this thread until stop, or until nothing is left to do.
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
  void stop() noexcept { dlm_scheduler_stop(get()); }  // from any thread
  dlm_scheduler_stats stats() const {
    dlm_scheduler_stats out;
    dlm_scheduler_get_stats(get(), &out);
    return out;
  }
  dlm_scheduler* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<dlm_bundle> bundle_;
  std::shared_ptr<detail::Orphans> orphans_;  // goes after what calls them
  detail::Owned<dlm_scheduler, dlm_scheduler_destroy> handle_;
};

}  // namespace dlm_runtime

#endif  // DLM_RUNTIME_HPP
