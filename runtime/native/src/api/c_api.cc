// The C ABI over the core: argument checks, handles, and the wall that no exception crosses.
#include "api/c_api.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "constraints/constrained.h"

using dlm::choose_policy, dlm::Clock, dlm::copy_message, dlm::make_request, dlm::require,
    dlm::take_options;

namespace {

std::vector<int32_t> check_canvas(const dlm::Denoiser& denoiser, const int32_t* tokens,
                                  size_t count, int32_t new_tokens) {
  if (count > 0) require(tokens, "tokens");
  if (new_tokens < 0)
    dlm::fail(DLM_INVALID_ARGUMENT,
              "max_new_tokens = %d is negative, and is not DLM_DEFAULT_NEW_TOKENS (%d)", new_tokens,
              DLM_DEFAULT_NEW_TOKENS);
  const auto longest = static_cast<size_t>(denoiser.max_canvas_length);
  const size_t length = count + static_cast<size_t>(new_tokens);
  if (count > longest || length > longest)
    dlm::fail(DLM_INVALID_ARGUMENT,
              "a canvas of %zu tokens (%zu given and %d new) is longer than the denoiser's %zu: "
              "give fewer "
              "tokens, or a smaller max_new_tokens",
              length, count, new_tokens, longest);
  if (length == 0)
    dlm::fail(DLM_INVALID_ARGUMENT,
              "the canvas is empty: give tokens, or max_new_tokens of at least 1");
  std::vector<int32_t> canvas(length, denoiser.mask_token_id);
  for (size_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= denoiser.vocab_size)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "token id %d at position %zu is outside the vocabulary (0..%d)", tokens[i], i,
                denoiser.vocab_size - 1);
    canvas[i] = tokens[i];
  }
  return canvas;
}

dlm_generate_options default_generate_options() {
  dlm_generate_options options{};
  options.struct_size = sizeof options;
  options.max_new_tokens = DLM_DEFAULT_NEW_TOKENS;
  return options;
}

}  // namespace

namespace dlm {

dlm_generate_options take_options(const dlm_bundle& bundle, const dlm_generate_options* options) {
  require(options, "options");
  dlm_generate_options taken = take(*options, default_generate_options());
  if (taken.steps < 0) fail(DLM_INVALID_ARGUMENT, "steps = %d is negative", taken.steps);
  if (taken.max_steps < 0)
    fail(DLM_INVALID_ARGUMENT, "max_steps = %d is negative", taken.max_steps);
  if (!(taken.deadline_ms >= 0 && taken.deadline_ms <= kLongest))
    fail(DLM_INVALID_ARGUMENT, "deadline_ms = %.10g is outside 0..%.10g", taken.deadline_ms,
         kLongest);
  if (taken.max_new_tokens == DLM_DEFAULT_NEW_TOKENS)
    taken.max_new_tokens = dlm_bundle_max_new_tokens(&bundle);
  return taken;
}

Clock::time_point deadline_of(const dlm_generate_options& options) {
  const std::chrono::duration<double, std::milli> time(options.deadline_ms);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
}

dlm_result result_of(const Outcome& outcome) {
  dlm_result found{};
  found.finish = static_cast<int32_t>(outcome.finish);
  found.nfe = outcome.nfe;
  found.prompt_tokens = outcome.prompt_tokens;
  found.completion_tokens = outcome.completion_tokens;
  found.log_probs = outcome.log_probs.data();
  found.undecided = outcome.undecided.data();
  found.length = outcome.undecided.size();
  found.constraint_log_prob_loss = outcome.constraint_log_prob_loss;
  return found;
}

Policy choose_policy(const dlm_bundle& bundle, const dlm_policy* given) {
  if (given != nullptr) return check_policy(*given);
  const Manifest& manifest = bundle.manifest;
  for (const auto& [name, preset] : manifest.presets)
    if (name == manifest.default_preset) return check_policy(preset);
  return check_policy(default_policy());
}

Constraint constraint_of(const dlm_automaton* automaton, int32_t given) {
  if (given < 0) fail(DLM_INVALID_ARGUMENT, "given = %d is negative", given);
  return {automaton == nullptr ? nullptr : automaton->automaton, given};
}

Request make_request(const dlm_bundle& bundle, const Constraint& constraint, const Policy& policy,
                     const dlm_generate_options& options, const int32_t* tokens, size_t count,
                     const std::string& name) {
  const Denoiser& denoiser = bundle.manifest.denoiser;
  std::vector<int32_t> canvas = check_canvas(denoiser, tokens, count, options.max_new_tokens);
  std::vector<uint8_t> undecided;
  for (const int32_t token : canvas) undecided.push_back(token == denoiser.mask_token_id ? 1 : 0);
  std::unique_ptr<Proposer> proposer;
  if (constraint.automaton != nullptr)
    proposer = std::make_unique<Constrained>(denoiser, policy, constraint.automaton,
                                             constraint.given, canvas, undecided);
  return Request(denoiser, *bundle.engine, policy, std::move(canvas), std::move(undecided),
                 options.steps, name, std::move(proposer));
}

}  // namespace dlm

namespace {

// Which requests of a session's call are to end; told by any thread.
class Cancels {
 public:
  void start(size_t requests) {
    std::vector<uint8_t> none(requests, 0);
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cancelled_.swap(none);
  }
  void cancel(size_t request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (request == DLM_ALL_REQUESTS)
      std::fill(is_cancelled_.begin(), is_cancelled_.end(), uint8_t{1});
    else if (request < is_cancelled_.size())
      is_cancelled_[request] = 1;
  }
  bool holds(size_t request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_cancelled_[request] != 0;
  }

 private:
  std::mutex mutex_;
  std::vector<uint8_t> is_cancelled_;  // by request; of no length where none runs
};

}  // namespace

struct dlm_session {
  explicit dlm_session(dlm_bundle& opened)
      : bundle(opened),
        context(opened.engine->open_context(opened.manifest.denoiser.max_canvas_length)) {}

  dlm_bundle& bundle;
  std::unique_ptr<dlm::Context> context;
  dlm::Buffers buffers;
  std::optional<dlm::Batch> batch;  // what runs: one request, or several together
  std::vector<size_t> numbers;      // of its requests
  Cancels cancels;
  std::optional<Clock::time_point> deadline;
  int32_t max_steps = 0;
  std::vector<dlm::Outcome> outcomes;  // of the requests that ended last
  dlm_pass_counts counts{};            // of the last passes
  dlm::Constraint constraint;          // of the requests to come
  dlm_before_pass_fn before_pass = nullptr;
  void* before_pass_user = nullptr;
  std::string text;  // what dlm_generate_text came to
  std::string last_error;
  bool is_running = false;  // inside a call, perhaps inside a callback of the caller's
};

namespace {

using dlm::guarded;

template <typename Body>
dlm_status guarded(dlm_session* session, Body body) {
  if (session == nullptr) return DLM_INVALID_ARGUMENT;
  const auto report = [&](const char* text) {
    session->last_error = text;
    dlm::make_one_line(session->last_error.data(), session->last_error.size());
  };
  if (session->is_running) {
    // It would pull the request, or the buffers of the pass, from under the call that is under way.
    const auto refuse = [] {
      dlm::fail(DLM_INVALID_ARGUMENT,
                "a call on this session is under way: a callback may make no other, and each "
                "thread takes a session of its own, or a scheduler");
    };
    return dlm::guarded(refuse, report);
  }
  session->is_running = true;
  session->last_error.clear();
  const dlm_status status = dlm::guarded(body, report);
  if (status == DLM_OK) session->last_error.clear();  // of a call that a callback tried
  session->is_running = false;
  return status;
}

// What every layer has; 0 where they differ.
int32_t of_all_layers(const dlm::CacheShape& cache, int32_t dlm::CacheLayer::* size) {
  const int32_t first = cache.front().*size;
  const auto same = [&](const dlm::CacheLayer& layer) { return layer.*size == first; };
  return std::all_of(cache.begin(), cache.end(), same) ? first : 0;
}

dlm_denoiser default_denoiser() {
  dlm_denoiser denoiser{};
  denoiser.struct_size = sizeof denoiser;
  denoiser.top_k = 2;
  denoiser.kv_element_bytes = 4;
  return denoiser;
}

dlm_open_options default_open_options() {
  dlm_open_options options{};
  options.struct_size = sizeof options;
  options.engine = "auto";
  options.check_hashes = 1;
  options.provider = "cpu";
  return options;
}

// The engine and provider that are asked for. Providers of GPUs are ONNX Runtime's alone.
struct EngineChoice {
  std::string engine;
  dlm::ProviderChoice provider;
};

EngineChoice choose_engine(const dlm_open_options& options) {
  EngineChoice choice{options.engine == nullptr ? "" : options.engine, {}};
  choice.provider.name = options.provider == nullptr ? "" : options.provider;
  choice.provider.device = options.device;
  choice.provider.allow_fallback = options.allow_fallback != 0;
  const std::string& engine = choice.engine;
  if (engine != "auto" && engine != "onnxruntime" && engine != "tensorrt" && engine != "none")
    dlm::fail(DLM_UNSUPPORTED, "engine \"%.40s\" is not one of: auto, onnxruntime, tensorrt, none",
              engine.c_str());
  if (!choice.provider.is_gpu()) return choice;
  if (engine == "tensorrt")
    dlm::fail(
        DLM_INVALID_ARGUMENT,
        "provider \"%.40s\" is for engine \"onnxruntime\": engine \"tensorrt\" runs engine files",
        choice.provider.name.c_str());
  if (engine == "auto") choice.engine = "onnxruntime";
  return choice;
}

// The cores that this process may use; 0 if the system does not say.
int available_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(
      std::thread::hardware_concurrency());  // a machine of more cores than the set holds
}

// More threads than cores only wait for each other, and the engine takes minutes to start
// thousands.
int limit_threads(int32_t wanted) {
  if (wanted < 0 || wanted > 4096)
    dlm::fail(DLM_INVALID_ARGUMENT, "threads = %d is outside 0..4096", wanted);
  const int cores = available_cores();
  return cores > 0 ? std::min<int>(wanted, cores) : wanted;
}

std::unique_ptr<dlm::Engine> open_engine(const dlm::Manifest& manifest, const EngineChoice& choice,
                                         const std::string& library, int threads) {
  const std::string& name = choice.engine;
  if (name == "none") return dlm::make_none(manifest.denoiser.cache);
  if (name == "tensorrt" || (name == "auto" && manifest.is_for_gpus)) {
    if (manifest.engines.empty())
      dlm::fail(DLM_UNSUPPORTED,
                "this bundle holds no TensorRT engine. %s, or open it with engine \"onnxruntime\": "
                "on the CPU, or with a provider such as \"cuda\"",
                manifest.is_for_gpus ? manifest.device_advice.c_str()
                                     : "Build it with --target for GPUs");
    return dlm::open_tensorrt(manifest.graph, manifest.engines, library);
  }
  return dlm::open_onnxruntime(manifest.graph, library, threads, choice.provider);
}

// Fills *policy, up to its struct_size, with the one of that name; false: there is none.
bool give_policy(const dlm::Policies& policies, const std::string& name, dlm_policy* policy) {
  require(policy, "policy");
  dlm::check_size(*policy);
  for (const auto& [known, fields] : policies) {
    if (known != name) continue;
    dlm::give(fields, policy->struct_size, policy);
    return true;
  }
  return false;
}

std::string names_of(const dlm::Policies& policies) {
  std::string names;
  for (const auto& [name, fields] : policies) names += (names.empty() ? "" : ", ") + name;
  return names;
}

// Puts each request, by number, into the first batch that has room for it and that it fits into.
std::vector<std::vector<size_t>> group(const std::vector<dlm::Request>& requests,
                                       size_t max_batch) {
  std::vector<std::vector<size_t>> batches;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto takes = [&](const auto& batch) {
      return batch.size() < max_batch && requests[batch[0]].fits(requests[i]);
    };
    const auto found = std::find_if(batches.begin(), batches.end(), takes);
    (found == batches.end() ? batches.emplace_back() : *found).push_back(i);
  }
  return batches;
}

void check_capacity(size_t capacity, size_t needed) {
  if (capacity >= needed) return;
  dlm::fail(DLM_INVALID_ARGUMENT, "capacity = %zu holds fewer tokens than the canvas of %zu",
            capacity, needed);
}

// Forgets what ran before; the limits of what runs now count from here.
void begin(dlm_session& session, const dlm_generate_options& options, size_t requests) {
  session.outcomes.clear();
  session.cancels.start(requests);
  session.max_steps = options.max_steps;
  session.deadline.reset();
  if (options.deadline_ms > 0) session.deadline = dlm::deadline_of(options);
}

void start(dlm_session& session, const dlm_generate_options& options, const int32_t* tokens,
           size_t count, size_t capacity = SIZE_MAX) {
  const dlm::Policy policy = choose_policy(session.bundle, options.policy);
  std::vector<dlm::Request> one;
  one.push_back(
      make_request(session.bundle, session.constraint, policy, options, tokens, count, ""));
  check_capacity(capacity, one[0].canvas().size());
  begin(session, options, 1);
  session.numbers = {0};
  session.batch.emplace(session.bundle.manifest.denoiser, std::move(one));
  session.counts = {};
}

void add(dlm_stats& sum, const dlm_stats& of_batch) {
  sum.nfe += of_batch.nfe;
  sum.prefill_s += of_batch.prefill_s;
  sum.passes_s += of_batch.passes_s;
  sum.selection_s += of_batch.selection_s;
  sum.cache_s += of_batch.cache_s;
  sum.total_s += of_batch.total_s;
  sum.cache_bytes = std::max(sum.cache_bytes, of_batch.cache_bytes);
}

void add(dlm_pass_counts& sum, const dlm_pass_counts& of_batch) {
  sum.prefill += of_batch.prefill;
  sum.denoise += of_batch.denoise;
  sum.store += of_batch.store;
}

const dlm::Request& running(const dlm_session& session) {
  return session.batch->requests().front();
}

// Outside of what is timed: it is the caller's.
void ask_before_pass(const dlm_session& session) {
  if (session.before_pass != nullptr && session.before_pass(session.before_pass_user) != 0)
    dlm::fail(DLM_CANCELLED, "before_pass asked to stop");
}

// Ends the requests of the batch that may take no more passes.
void end_requests(dlm_session& session) {
  const bool is_late = session.deadline && Clock::now() >= *session.deadline;
  for (size_t i = 0; i < session.numbers.size(); ++i) {
    const bool is_spent =
        session.max_steps > 0 && session.batch->requests()[i].nfe() >= session.max_steps;
    if (session.cancels.holds(session.numbers[i]))
      session.batch->end(i, dlm::Finish::cancelled);
    else if (is_spent)
      session.batch->end(i, dlm::Finish::steps);
    else if (is_late)
      session.batch->end(i, dlm::Finish::deadline);
  }
}

void step(dlm_session& session) {
  if (!session.batch)
    dlm::fail(DLM_INVALID_ARGUMENT, "no request is running: call dlm_session_start first");
  try {
    if (!session.batch->done()) ask_before_pass(session);
    end_requests(session);
    session.batch->step(*session.context, session.buffers);
    end_requests(session);
    session.counts = session.batch->counts();
  } catch (...) {
    session.batch.reset();
    throw;
  }
}

// What several requests came to, by number.
struct Results {
  explicit Results(size_t count) : canvases(count), outcomes(count) {}

  std::vector<std::vector<int32_t>> canvases;
  std::vector<dlm::Outcome> outcomes;
  dlm_stats stats{};
  dlm_pass_counts counts{};
};

// As many together as fit each other.
void go_in_lockstep(dlm_session& session, std::vector<dlm::Request> made, int32_t max_batch,
                    Results& results) {
  const auto batches = group(made, static_cast<size_t>(max_batch));
  for (const auto& batch : batches)
    dlm::check_batch(*session.bundle.engine, static_cast<int32_t>(batch.size()));
  for (const auto& batch : batches) {
    std::vector<dlm::Request> together;
    for (const size_t number : batch) together.push_back(std::move(made[number]));
    session.numbers = batch;
    session.batch.emplace(session.bundle.manifest.denoiser, std::move(together));
    while (!session.batch->done()) step(session);
    for (size_t i = 0; i < batch.size(); ++i) {
      const dlm::Request& done = session.batch->requests()[i];
      results.canvases[batch[i]] = done.canvas();
      results.outcomes[batch[i]] = done.outcome();
    }
    add(results.stats, session.batch->stats());
    add(results.counts, session.batch->counts());
  }
  session.batch.reset();
}

// Whatever they are: one joins whenever another is done.
void share_passes(dlm_session& session, const dlm_generate_options& options,
                  std::vector<dlm::Request> made, int32_t max_batch, Results& results) {
  const auto count = static_cast<int32_t>(made.size());
  dlm::Scheduler scheduler(
      session.bundle.manifest.denoiser, *session.bundle.engine,
      {max_batch, count, INT32_MAX, dlm::most_rows(made, static_cast<size_t>(max_batch))});
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (dlm::Request& request : made)
    jobs.push_back(scheduler.submit(std::move(request),
                                    {options.max_steps, session.deadline, nullptr, nullptr}));
  scheduler.run(true, [&] {
    ask_before_pass(session);
    for (size_t i = 0; i < jobs.size(); ++i)
      if (session.cancels.holds(i)) jobs[i]->cancel();
    return true;
  });
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i]->status() != DLM_OK) throw dlm::Error(jobs[i]->status(), jobs[i]->message());
    results.canvases[i] = jobs[i]->canvas();
    results.outcomes[i] = jobs[i]->outcome();
  }
  results.stats = scheduler.stats();
  results.counts = scheduler.counts();
}

}  // namespace

dlm_bundle& dlm::bundle_of(dlm_session& session) { return session.bundle; }

std::string& dlm::text_of(dlm_session& session) { return session.text; }

dlm_status dlm::guarded_call(dlm_session* session, void (*body)(void* user), void* user) {
  return ::guarded(session, [&] { body(user); });
}

uint32_t dlm_abi_version(void) { return DLM_ABI_VERSION; }

const char* dlm_version(void) { return DLM_VERSION; }

const char* dlm_status_name(dlm_status status) {
  switch (status) {
    case DLM_OK:
      return "OK";
    case DLM_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case DLM_NOT_FOUND:
      return "NOT_FOUND";
    case DLM_BAD_BUNDLE:
      return "BAD_BUNDLE";
    case DLM_UNSUPPORTED:
      return "UNSUPPORTED";
    case DLM_ENGINE_FAILED:
      return "ENGINE_FAILED";
    case DLM_OUT_OF_MEMORY:
      return "OUT_OF_MEMORY";
    case DLM_CANCELLED:
      return "CANCELLED";
    case DLM_INTERNAL:
      return "INTERNAL";
    case DLM_ENGINE_MISSING:
      return "ENGINE_MISSING";
    case DLM_BUSY:
      return "BUSY";
    default:
      return "unknown status";
  }
}

// Parentheses keep the macros away from the functions of programs that know the structs of the
// first header alone.
void dlm_denoiser_init_sized(dlm_denoiser* denoiser, size_t struct_size) {
  dlm::give(default_denoiser(), struct_size, denoiser);
}
void(dlm_denoiser_init)(dlm_denoiser* denoiser) {
  dlm_denoiser_init_sized(denoiser, dlm::Sized<dlm_denoiser>::sizes.front());
}

void dlm_policy_init_sized(dlm_policy* policy, size_t struct_size) {
  dlm::give(dlm::default_policy(), struct_size, policy);
}
void(dlm_policy_init)(dlm_policy* policy) {
  dlm_policy_init_sized(policy, dlm::Sized<dlm_policy>::sizes.front());
}

const dlm_policy_field* dlm_policy_field_at(size_t index) {
  return index < std::size(dlm::kPolicyFields) ? &dlm::kPolicyFields[index] : nullptr;
}

void dlm_open_options_init_sized(dlm_open_options* options, size_t struct_size) {
  dlm::give(default_open_options(), struct_size, options);
}
void(dlm_open_options_init)(dlm_open_options* options) {
  dlm_open_options_init_sized(options, dlm::Sized<dlm_open_options>::sizes.front());
}

void dlm_generate_options_init_sized(dlm_generate_options* options, size_t struct_size) {
  dlm::give(default_generate_options(), struct_size, options);
}
void(dlm_generate_options_init)(dlm_generate_options* options) {
  dlm_generate_options_init_sized(options, dlm::Sized<dlm_generate_options>::sizes.front());
}

dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                           size_t message_capacity, dlm_bundle** bundle) {
  if (bundle != nullptr) *bundle = nullptr;
  return guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    require(path, "path");
    dlm_open_options chosen = default_open_options();
    if (options != nullptr) chosen = dlm::take(*options, chosen);
    const EngineChoice choice = choose_engine(chosen);
    const int threads = limit_threads(chosen.threads);
    auto opened = std::make_unique<dlm_bundle>();
    opened->manifest = dlm::read_bundle(path, chosen.check_hashes != 0, choice.engine);
    const std::string library = chosen.engine_library == nullptr ? "" : chosen.engine_library;
    // On a thread of its own, if one is to be had, while the engine maps the files.
    std::future<void> hashed = std::async([&files = opened->manifest.unhashed] {
      for (const dlm::FileHash& file : files) dlm::check_hash(file);
    });
    try {
      opened->engine = open_engine(opened->manifest, choice, library, threads);
    } catch (...) {
      hashed.get();  // a damaged file explains what an engine says of it
      throw;
    }
    hashed.get();
    opened->engine_description = opened->engine->description();
    *bundle = opened.release();
  });
}

dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run, void* user,
                                    char* message, size_t message_capacity, dlm_bundle** bundle) {
  if (bundle != nullptr) *bundle = nullptr;
  return guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    require(denoiser, "denoiser");
    if (run == nullptr) dlm::fail(DLM_INVALID_ARGUMENT, "run is NULL");
    auto opened = std::make_unique<dlm_bundle>();
    opened->manifest.denoiser = dlm::check_denoiser(dlm::take(*denoiser, default_denoiser()));
    opened->engine = dlm::make_callback(run, user, opened->manifest.denoiser);
    opened->engine_description = opened->engine->description();
    *bundle = opened.release();
  });
}

void dlm_bundle_destroy(dlm_bundle* bundle) { delete bundle; }

void dlm_bundle_denoiser_sized(const dlm_bundle* bundle, dlm_denoiser* denoiser,
                               size_t struct_size) {
  if (bundle == nullptr) return;
  const dlm::Denoiser& d = bundle->manifest.denoiser;
  dlm_denoiser told = default_denoiser();
  told.vocab_size = d.vocab_size;
  told.mask_token_id = d.mask_token_id;
  told.max_canvas_length = d.max_canvas_length;
  told.layers = static_cast<int32_t>(d.cache.size());
  told.kv_heads = of_all_layers(d.cache, &dlm::CacheLayer::kv_heads);
  told.head_size = of_all_layers(d.cache, &dlm::CacheLayer::head_size);
  told.top_k = d.top_k;
  told.kv_element_bytes = of_all_layers(d.cache, &dlm::CacheLayer::element_bytes);
  told.shift = d.shift;
  told.has_cache = d.has_cache ? 1 : 0;
  told.eos_token_ids = d.eos_token_ids.data();
  told.eos_count = d.eos_token_ids.size();
  told.visible_block = d.visible_block;
  dlm::give(told, struct_size, denoiser);
}
void(dlm_bundle_denoiser)(const dlm_bundle* bundle, dlm_denoiser* denoiser) {
  dlm_bundle_denoiser_sized(bundle, denoiser, dlm::Sized<dlm_denoiser>::sizes.front());
}

const char* dlm_bundle_manifest(const dlm_bundle* bundle) {
  return bundle == nullptr ? "" : bundle->manifest.text.c_str();
}

const char* dlm_bundle_engine(const dlm_bundle* bundle) {
  return bundle == nullptr ? "" : bundle->engine_description.c_str();
}

int32_t dlm_bundle_max_new_tokens(const dlm_bundle* bundle) {
  return bundle == nullptr ? 0 : bundle->manifest.max_new_tokens;
}

dlm_status dlm_bundle_preset(const dlm_bundle* bundle, const char* name, char* message,
                             size_t message_capacity, dlm_policy* policy) {
  return guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    const dlm::Manifest& manifest = bundle->manifest;
    const std::string wanted = name == nullptr ? manifest.default_preset : name;
    if (give_policy(manifest.presets, wanted, policy)) return;
    dlm::fail(DLM_NOT_FOUND, "preset \"%.40s\" is not one of this bundle's: %s", wanted.c_str(),
              manifest.presets.empty() ? "it has none" : names_of(manifest.presets).c_str());
  });
}

dlm_status dlm_bundle_effort(const dlm_bundle* bundle, const char* level, char* message,
                             size_t message_capacity, dlm_policy* policy) {
  return guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    require(level, "level");
    const dlm::Policies& efforts = bundle->manifest.efforts;
    if (give_policy(efforts, level, policy)) return;
    if (efforts.empty())
      dlm::fail(DLM_NOT_FOUND,
                "effort \"%.40s\": this bundle has no levels: `dlm-export effort BUNDLE --data "
                "FILE` fits them, instant, low, medium and high",
                level);
    dlm::fail(DLM_NOT_FOUND, "effort \"%.40s\" is not one of %s", level, names_of(efforts).c_str());
  });
}

dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                              dlm_session** session) {
  if (session != nullptr) *session = nullptr;
  return guarded(message, message_capacity, [&] {
    require(session, "session");
    require(bundle, "bundle");
    *session = new dlm_session(*bundle);
  });
}

void dlm_session_destroy(dlm_session* session) { delete session; }

const char* dlm_session_last_error(const dlm_session* session) {
  return session == nullptr ? "session is NULL" : session->last_error.c_str();
}

dlm_status dlm_automaton_open(const char* path, char* message, size_t message_capacity,
                              dlm_automaton** automaton) {
  if (automaton != nullptr) *automaton = nullptr;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(path, "path");
    *automaton = new dlm_automaton{std::make_shared<dlm::Automaton>(dlm::open_automaton(path))};
  });
}

dlm_status dlm_automaton_read(const void* data, size_t size, char* message, size_t message_capacity,
                              dlm_automaton** automaton) {
  if (automaton != nullptr) *automaton = nullptr;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(data, "data");
    *automaton = new dlm_automaton{
        std::make_shared<dlm::Automaton>(dlm::read_automaton(data, size, "the constraint"))};
  });
}

void dlm_automaton_destroy(dlm_automaton* automaton) { delete automaton; }

int32_t dlm_automaton_shortest(const dlm_automaton* automaton) {
  return automaton == nullptr ? 0 : automaton->automaton->distances.front();
}

dlm_status dlm_session_constrain(dlm_session* session, const dlm_automaton* automaton) {
  return dlm_session_constrain_from(session, automaton, 0);
}

dlm_status dlm_session_constrain_from(dlm_session* session, const dlm_automaton* automaton,
                                      int32_t given) {
  return guarded(session, [&] { session->constraint = dlm::constraint_of(automaton, given); });
}

dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                   void* user) {
  return guarded(session, [&] {
    session->before_pass = before_pass;
    session->before_pass_user = user;
  });
}

dlm_status dlm_session_generate(dlm_session* session, const dlm_generate_options* options,
                                int32_t* tokens, size_t count, size_t capacity, dlm_stats* stats,
                                size_t* length) {
  if (length != nullptr) *length = 0;
  if (stats != nullptr) *stats = {};
  return guarded(session, [&] {
    require(length, "length");
    require(tokens, "tokens");
    session->batch.reset();
    const dlm_generate_options chosen = take_options(session->bundle, options);
    start(*session, chosen, tokens, count, capacity);
    while (!session->batch->done()) {
      step(*session);
      if (chosen.on_step == nullptr) continue;
      const dlm_step view = running(*session).view();
      if (chosen.on_step(chosen.user, &view) != 0) {
        session->batch.reset();
        dlm::fail(DLM_CANCELLED, "a callback asked to stop after %d passes", view.nfe);
      }
    }
    session->outcomes = {running(*session).outcome()};
    const auto& canvas = running(*session).canvas();
    std::memcpy(tokens, canvas.data(), canvas.size() * sizeof(int32_t));
    if (stats != nullptr) *stats = session->batch->stats();
    *length = canvas.size();
  });
}

dlm_status dlm_session_generate_batch(dlm_session* session, const dlm_generate_options* options,
                                      dlm_request* requests, size_t request_count,
                                      int32_t max_batch, dlm_stats* stats) {
  for (size_t i = 0; requests != nullptr && i < request_count; ++i)
    requests[i].length = 0, requests[i].nfe = 0;
  if (stats != nullptr) *stats = {};
  return guarded(session, [&] {
    session->batch.reset();
    const dlm_generate_options chosen = take_options(session->bundle, options);
    if (chosen.on_step != nullptr)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "on_step must be NULL: requests that run together have no step of their own");
    if (max_batch < 1 || max_batch > dlm::kMostRequests)
      dlm::fail(DLM_INVALID_ARGUMENT, "max_batch = %d is outside 1..%d", max_batch,
                dlm::kMostRequests);
    if (request_count > 0) require(requests, "requests");
    std::vector<dlm::Request> made;
    for (size_t i = 0; i < request_count; ++i) {
      const std::string name = "request " + std::to_string(i) + ": ";
      dlm::with_name(name, [&] {
        require(requests[i].tokens, "tokens");
        const dlm_policy* given = chosen.policy;
        if (chosen.policies != nullptr) require(given = chosen.policies[i], "policy");
        const dlm::Policy policy = choose_policy(session->bundle, given);
        made.push_back(make_request(session->bundle, session->constraint, policy, chosen,
                                    requests[i].tokens, requests[i].count, name));
        check_capacity(requests[i].capacity, made.back().canvas().size());
      });
    }
    begin(*session, chosen, request_count);
    Results results(request_count);
    if (session->bundle.engine->takes_segments())
      share_passes(*session, chosen, std::move(made), max_batch, results);
    else
      go_in_lockstep(*session, std::move(made), max_batch, results);
    session->counts = results.counts;
    for (size_t i = 0; i < request_count; ++i) {
      std::memcpy(requests[i].tokens, results.canvases[i].data(),
                  results.canvases[i].size() * sizeof(int32_t));
      requests[i].length = results.canvases[i].size();
      requests[i].nfe = results.outcomes[i].nfe;
    }
    session->outcomes = std::move(results.outcomes);
    if (stats != nullptr) *stats = results.stats;
  });
}

dlm_status dlm_session_start(dlm_session* session, const dlm_generate_options* options,
                             const int32_t* tokens, size_t count) {
  return guarded(session, [&] {
    session->batch.reset();
    start(*session, take_options(session->bundle, options), tokens, count);
  });
}

dlm_status dlm_session_step(dlm_session* session, dlm_step* view) {
  if (view != nullptr) *view = {};
  return guarded(session, [&] {
    require(view, "step");
    step(*session);
    *view = running(*session).view();
    if (view->done != 0) session->outcomes = {running(*session).outcome()};
  });
}

dlm_status dlm_session_result_sized(dlm_session* session, size_t request, dlm_result* result,
                                    size_t struct_size) {
  dlm::give(dlm_result{}, struct_size, result);
  return guarded(session, [&] {
    require(result, "result");
    if (request >= session->outcomes.size())
      dlm::fail(DLM_INVALID_ARGUMENT,
                "request %zu has no result: %zu requests of this session have ended since one was "
                "started",
                request, session->outcomes.size());
    dlm::give(dlm::result_of(session->outcomes[request]), struct_size, result);
  });
}

void dlm_session_cancel(dlm_session* session, size_t request) {
  if (session != nullptr) session->cancels.cancel(request);
}

void dlm_session_stats(const dlm_session* session, dlm_stats* stats) {
  if (stats == nullptr) return;
  *stats = session != nullptr && session->batch ? session->batch->stats() : dlm_stats{};
}

void dlm_session_pass_counts_sized(const dlm_session* session, dlm_pass_counts* counts,
                                   size_t struct_size) {
  dlm::give(session == nullptr ? dlm_pass_counts{} : session->counts, struct_size, counts);
}

const uint8_t* dlm_session_undecided(const dlm_session* session, size_t* length) {
  const bool has_one =
      session != nullptr && session->batch && session->batch->requests().size() == 1;
  if (length != nullptr) *length = has_one ? running(*session).undecided().size() : 0;
  return has_one ? running(*session).undecided().data() : nullptr;
}

dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                              const int32_t* rows, size_t row_count, float* logits,
                              size_t capacity) {
  return guarded(session, [&] {
    session->batch.reset();
    const dlm::Denoiser& denoiser = session->bundle.manifest.denoiser;
    const std::vector<int32_t> canvas = check_canvas(denoiser, tokens, count, 0);
    require(rows, "rows");
    require(logits, "logits");
    const auto width = static_cast<size_t>(denoiser.vocab_size);
    if (row_count == 0 || row_count > count || capacity / width < row_count)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "row_count = %zu must be in 1..%zu with a capacity of %zu floats a row", row_count,
                count, width);
    for (size_t i = 0; i < row_count; ++i)
      if (rows[i] < 0 || static_cast<size_t>(rows[i]) >= count)
        dlm::fail(DLM_INVALID_ARGUMENT, "row %d is outside the canvas (0..%zu)", rows[i],
                  count - 1);
    const dlm::Engine& engine = *session->bundle.engine;
    const auto length = static_cast<int32_t>(count);
    const auto most = static_cast<size_t>(engine.max_rows(length, 0));
    if (most == 0)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "a pass over the whole canvas has %d tokens, but the engine takes %s: give fewer "
                "tokens, or build the engine "
                "again with a larger --canvas",
                length, engine.limits().c_str());
    dlm::Buffers& buffers = session->buffers;
    dlm_pass pass = dlm::prepare_pass({&canvas}, 0, length, buffers);
    for (size_t first = 0; first < row_count; first += static_cast<size_t>(pass.rows)) {
      pass.rows = static_cast<int32_t>(std::min(most, row_count - first));
      const size_t last = first + static_cast<size_t>(pass.rows);
      buffers.score_rows.assign(rows + first, rows + last);
      dlm::prepare_scores(denoiser, pass, buffers);
      pass.logits = logits + first * width;
      ask_before_pass(*session);
      session->context->run(pass, dlm::CacheUse::none);
    }
  });
}

dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                   int32_t cached, int32_t rows, double* seconds, size_t repeats) {
  return guarded(session, [&] {
    session->batch.reset();
    if (repeats > 0) require(seconds, "seconds");
    dlm::time_passes(session->bundle.manifest.denoiser, *session->bundle.engine, *session->context,
                     session->buffers, batch, tokens, cached, rows, seconds, repeats,
                     [&] { ask_before_pass(*session); });
  });
}
