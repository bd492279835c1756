// Makes the allocations of C ABI calls fail, one at a time. Each call with a failed allocation must
// return a status and must not leak. After that, the object must accept the next call, which must
// give the usual result.
//
// memory_test STRIDE [BUNDLE]: makes every STRIDE-th allocation fail. Also opens BUNDLE, a folder
// with a compiled text file. The program is compiled with the library's sources, so that it can
// give a bundle a fake engine. Prints "N allocations failed, N claims did": the number of
// allocations that the test made fail, and the number of failed checks.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "base/sha256.h"
#include "dlm_runtime.h"
#include "engines/engine.h"

namespace {

// The number of allocations that still succeed before one allocation fails. If it is negative, no
// allocation fails. The allocations of all threads count, because opening a bundle hashes files on
// a second thread.
std::atomic<long> allocations_left{-1};
std::atomic<bool> has_failed{false};

bool fails_now() {
  if (allocations_left.load(std::memory_order_relaxed) < 0 || allocations_left.fetch_sub(1) != 0)
    return false;
  has_failed = true;
  return true;
}

void* try_to_allocate(std::size_t bytes) noexcept {
  return fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

void* allocate(std::size_t bytes) {
  void* const found = try_to_allocate(bytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}

// Stops failing allocations. The test calls this function before it allocates memory itself.
void stop_failing() { allocations_left = -1; }

int failures = 0, wrong = 0;

void check(bool holds, const char* name, long number, const char* what) {
  if (holds) return;
  ++wrong;
  std::printf("%s, allocation %ld: %s\n", name, number, what);
}

// The result of a call: its status, and all its outputs as text.
struct Came {
  dlm_status status;
  std::string result;
};

// Calls `call` many times, and each time makes a different allocation fail. `prepare` creates a new
// object for each call. If an allocation fails, the call must return OUT_OF_MEMORY or the usual
// result. Then a second call on the same object must give the usual result. `wanted` is the status
// of the call if no allocation fails.
template <class Prepare, class Call>
void sweep(const char* name, long stride, Prepare prepare, Call call, dlm_status wanted = DLM_OK) {
  Came whole;
  {
    auto on = prepare();
    whole = call(on);
    check(whole.status == wanted, name, -1, dlm_status_name(whole.status));
  }
  for (long number = 0;; number += stride) {
    auto on = prepare();
    has_failed = false;
    allocations_left = number;
    const Came found = call(on);
    stop_failing();
    if (!has_failed) break;
    ++failures;
    const bool is_same = found.status == whole.status && found.result == whole.result;
    check(found.status == DLM_OUT_OF_MEMORY || is_same, name, number,
          dlm_status_name(found.status));
    const Came next = call(on);
    check(next.status == whole.status && next.result == whole.result, name, number,
          "the next call comes to something else");
  }
}

constexpr int32_t kVocab = 40, kMask = 39, kEos = 5, kLength = 24;

dlm_status run(void*, const dlm_pass* pass) {
  for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
    const int64_t position =
        pass->position_ids[row / pass->rows * pass->tokens + pass->score_rows[row]];
    const auto token = static_cast<int32_t>(6 + position % 30);
    pass->top_tokens[2 * row] = token, pass->top_tokens[2 * row + 1] = token + 1;
    pass->top_probs[2 * row] = 0.5f, pass->top_probs[2 * row + 1] = 0.25f;
    if (pass->entropy != nullptr) pass->entropy[row] = -1;
    for (int32_t v = 0; pass->logits != nullptr && v < kVocab; ++v)
      pass->logits[row * kVocab + v] =
          v == token ? 3.0f : static_cast<float>((v * 7 + token) % 16) / 8;
  }
  return DLM_OK;
}

// Like the engine above, but requests may share a pass.
class Sharing final : public dlm::HostEngine {
 public:
  explicit Sharing(dlm::CacheShape cache) : HostEngine(std::move(cache)) {}
  bool takes_segments() const override { return true; }
  std::string description() const override { return "shared"; }
  void run(const dlm::Pass& pass, const std::vector<dlm::Segment>&,
           const dlm::WindowRows&) override {
    ::run(nullptr, &pass);
  }
};

struct Destroy {
  void operator()(dlm_bundle* bundle) const { dlm_bundle_destroy(bundle); }
  void operator()(dlm_session* session) const { dlm_session_destroy(session); }
  void operator()(dlm_scheduler* scheduler) const { dlm_scheduler_destroy(scheduler); }
  void operator()(dlm_job* job) const { dlm_job_destroy(job); }
  void operator()(dlm_automaton* automaton) const { dlm_automaton_destroy(automaton); }
  void operator()(dlm_text* text) const { dlm_text_destroy(text); }
};
template <class Handle>
using Owned = std::unique_ptr<Handle, Destroy>;

char message[1024];

template <class Handle, class Make>
Owned<Handle> made(Make make) {
  Handle* handle = nullptr;
  if (make(&handle) != DLM_OK) std::printf("cannot be made: %s\n", message), std::exit(1);
  return Owned<Handle>(handle);
}

dlm_denoiser denoiser() {
  dlm_denoiser made;
  dlm_denoiser_init(&made, sizeof made);
  made.vocab_size = kVocab, made.mask_token_id = kMask, made.max_canvas_length = 64;
  made.layers = 2, made.kv_heads = made.head_size = made.has_cache = 1;
  made.eos_token_ids = &kEos, made.eos_count = 1;
  return made;
}

Owned<dlm_bundle> bundle_of_callback() {
  const dlm_denoiser told = denoiser();
  return made<dlm_bundle>([&](dlm_bundle** out) {
    return dlm_bundle_from_callback(&told, run, nullptr, message, sizeof message, out);
  });
}

Owned<dlm_bundle> bundle_that_shares() {
  Owned<dlm_bundle> bundle = bundle_of_callback();
  bundle->engine = std::make_unique<Sharing>(bundle->manifest.denoiser.cache);
  return bundle;
}

Owned<dlm_session> session_of(dlm_bundle& bundle) {
  return made<dlm_session>(
      [&](dlm_session** out) { return dlm_session_create(&bundle, message, sizeof message, out); });
}

constexpr int32_t kGiven[] = {1, 2, 3, 4};

dlm_request request_of(const dlm_policy& policy, int32_t first = 0) {
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.tokens = kGiven + first, request.token_count = 2;
  request.policy = &policy, request.max_new_tokens = kLength - 2, request.deadline_ms = 1e9;
  return request;
}

dlm_policy policy(bool is_guided) {
  dlm_policy made;
  dlm_policy_init(&made, sizeof made);
  made.block_length = 8, made.cache = "dual", made.select = "sample", made.temperature = 1,
  made.top_p = 0.9;
  made.cfg_scale = is_guided ? 1 : 0;
  return made;
}

std::string told(const dlm_result& result) {
  std::string text;
  for (size_t i = 0; i < result.length; ++i) text += std::to_string(result.tokens[i]) + " ";
  text += std::to_string(result.finish) + ":";
  for (size_t i = 0; i < result.length; ++i)
    text += std::isnan(result.log_probs[i]) ? 'g' : result.undecided[i] != 0 ? 'u' : 'd';
  return text + result.text;
}

std::string shown(const int32_t* tokens, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += std::to_string(tokens[i]) + " ";
  return text;
}

// Returns the status, and the session's message for its last call. The message may be empty if
// there was no memory for it.
Came of(dlm_session& session, dlm_status status) {
  stop_failing();
  return {status, dlm_session_last_error(&session)};
}

Came generate(dlm_session& session, const dlm_request& request) {
  const dlm_result* result = nullptr;
  const dlm_status status = dlm_session_generate(&session, &request, &result);
  Came came = of(session, status);
  if (status == DLM_OK) came.result += told(*result);
  return came;
}

Came generate_batch(dlm_session& session, const dlm_policy& policy) {
  const dlm_request made[] = {request_of(policy), request_of(policy, 1), request_of(policy, 2)};
  const dlm_request* const requests[] = {&made[0], &made[1], &made[2]};
  dlm_status status = dlm_session_generate_batch(&session, requests, 3, 2);
  const dlm_result* results[3] = {};
  for (size_t i = 0; status == DLM_OK && i < 3; ++i)
    status = dlm_session_result(&session, i, &results[i]);
  Came came = of(session, status);
  for (size_t i = 0; status == DLM_OK && i < 3; ++i) came.result += told(*results[i]);
  return came;
}

Came generate_stepwise(dlm_session& session, const dlm_request& request) {
  dlm_status status = dlm_session_start(&session, &request);
  const dlm_step* step = nullptr;
  do {
    if (status == DLM_OK) status = dlm_session_step(&session, &step);
  } while (status == DLM_OK && step->done == 0);
  Came came = of(session, status);
  if (status == DLM_OK) came.result += shown(step->canvas, static_cast<size_t>(step->length));
  return came;
}

void sweep_sessions(long stride) {
  const dlm_denoiser wanted = denoiser();
  sweep(
      "dlm_bundle_from_callback", stride, [] { return 0; },
      [&](int) {
        dlm_bundle* bundle = nullptr;
        const dlm_status status =
            dlm_bundle_from_callback(&wanted, run, nullptr, nullptr, 0, &bundle);
        const Owned<dlm_bundle> owned(bundle);
        return Came{status, ""};
      });
  const Owned<dlm_bundle> alone = bundle_of_callback(), shared = bundle_that_shares();
  const auto anew = [&](dlm_bundle& bundle) { return [&bundle] { return session_of(bundle); }; };
  for (const bool is_guided : {false, true}) {
    const dlm_policy chosen = policy(is_guided);
    const dlm_request request = request_of(chosen);
    sweep(
        "dlm_session_create and generate", stride, [] { return 0; },
        [&](int) {
          dlm_session* session = nullptr;
          const dlm_status status = dlm_session_create(alone.get(), nullptr, 0, &session);
          const Owned<dlm_session> owned(session);
          return status == DLM_OK ? generate(*session, request) : Came{status, ""};
        });
    for (dlm_bundle* const bundle : {alone.get(), shared.get()}) {
      sweep("dlm_session_generate", stride, anew(*bundle),
            [&](auto& session) { return generate(*session, request); });
      sweep("dlm_session_generate_batch", stride, anew(*bundle),
            [&](auto& session) { return generate_batch(*session, chosen); });
      sweep("dlm_session_step", stride, anew(*bundle),
            [&](auto& session) { return generate_stepwise(*session, request); });
    }
  }
  sweep("dlm_session_logits", stride, anew(*alone), [&](auto& session) {
    const int32_t tokens[] = {1, 2, 3}, rows[] = {0, 2};
    float logits[2 * kVocab] = {};
    return of(*session, dlm_session_logits(session.get(), tokens, 3, rows, 2, logits, 2 * kVocab));
  });
  sweep("dlm_session_time_passes", stride, anew(*alone), [&](auto& session) {
    double seconds[2];
    return of(*session, dlm_session_time_passes(session.get(), 2, 4, 8, 2, seconds, 2));
  });
  // Tests calls that fail, because their error messages need memory too.
  sweep(
      "a canvas that is too long", stride, anew(*alone),
      [&](auto& session) {
        dlm_request request;
        dlm_request_init(&request, sizeof request);
        request.new_tokens = 1000;
        return generate(*session, request);
      },
      DLM_INVALID_ARGUMENT);
  sweep(
      "a batch of a wrong request", stride, anew(*alone),
      [&](auto& session) {
        dlm_policy chosen = policy(false);
        chosen.commit = "a commit that there is not";
        return generate_batch(*session, chosen);
      },
      DLM_INVALID_ARGUMENT);
}

// Returns an automaton that accepts all texts. It has one state, one class and one group.
std::string any_text() {
  std::vector<int32_t> numbers = {kVocab, 1, 1, 1, 1, 1};
  numbers.resize(numbers.size() + 8);  // the field made_of
  for (int32_t token = 0; token < kVocab; ++token) numbers.push_back(token == kMask ? -1 : 0);
  for (const int32_t number : {0, 1, 0, 0, 1, 0, 0, 0})
    numbers.push_back(number);  // the groups, the edges and the distances
  std::string file = "DLMAUTO\x01";
  file.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int32_t));
  dlm::Sha256 hash;
  hash.update(file.data(), file.size());
  const auto digest = hash.digest();
  return file.append(reinterpret_cast<const char*>(digest.data()), digest.size());
}

void sweep_constraints(long stride) {
  const std::string file = any_text();
  const auto read = [&](dlm_automaton** out) {
    dlm_constraint constraint;
    dlm_constraint_init(&constraint, sizeof constraint);
    constraint.kind = DLM_CONSTRAINT_COMPILED;
    constraint.content = file.data(), constraint.content_size = file.size();
    return dlm_automaton_compile(nullptr, &constraint, message, sizeof message, out);
  };
  sweep(
      "a compiled constraint", stride, [] { return 0; },
      [&](int) {
        dlm_automaton* automaton = nullptr;
        const dlm_status status = read(&automaton);
        const Owned<dlm_automaton> owned(automaton);
        stop_failing();
        const dlm_automaton_info* const info = dlm_automaton_describe(automaton);
        return Came{status, info == nullptr ? "" : std::to_string(info->shortest)};
      });
  sweep(
      "dlm_automaton_compile", stride, [] { return 0; },
      [&](int) {
        const char* const tokens[] = {"{", "}", "\"", ":", ",", "a", "1"};
        const size_t sizes[] = {1, 1, 1, 1, 1, 1, 1};
        const int32_t end = 7;
        const char schema[] =
            "{\"properties\":{\"a\":{\"maximum\":11,\"type\":\"integer\"}},\"type\":\"object\"}";
        dlm_constraint constraint;
        dlm_constraint_init(&constraint, sizeof constraint);
        constraint.kind = DLM_CONSTRAINT_SCHEMA;
        constraint.content = schema, constraint.content_size = sizeof schema - 1;
        constraint.tokens = tokens, constraint.token_sizes = sizes, constraint.token_count = 7;
        constraint.vocab_size = 8, constraint.eos_token_ids = &end, constraint.eos_count = 1;
        dlm_automaton* automaton = nullptr;
        const dlm_status status =
            dlm_automaton_compile(nullptr, &constraint, message, sizeof message, &automaton);
        const Owned<dlm_automaton> owned(automaton);
        stop_failing();
        const dlm_automaton_info* const info = dlm_automaton_describe(automaton);
        return Came{status, info == nullptr ? "" : std::to_string(info->states)};
      });
  const Owned<dlm_bundle> bundle = bundle_of_callback();
  const Owned<dlm_automaton> automaton = made<dlm_automaton>(read);
  for (const char* const score_of : {"prediction", "marginal"}) {
    dlm_policy chosen = policy(false);
    chosen.score_of = score_of;
    dlm_request request = request_of(chosen);
    request.constraint = automaton.get();
    sweep(
        "a constrained request", stride, [&] { return session_of(*bundle); },
        [&](auto& session) { return generate(*session, request); });
  }
}

// Returns the results of three requests of one scheduler. If one request runs out of memory, the
// other two must still give their usual results.
Came schedule(dlm_scheduler& scheduler, const dlm_policy& policy) {
  Owned<dlm_job> jobs[3];
  Came came{DLM_OK, ""};
  const auto keep = [&](dlm_status status) {
    if (came.status == DLM_OK) came.status = status;
  };
  for (int32_t i = 0; i < 3; ++i) {
    const dlm_request request = request_of(policy, i);
    dlm_job* job = nullptr;
    keep(dlm_scheduler_submit(&scheduler, &request, nullptr, 0, &job));
    jobs[i].reset(job);
  }
  const dlm_status ran = dlm_scheduler_run(&scheduler, 1, nullptr, nullptr, nullptr, 0);
  keep(ran);
  if (ran != DLM_OK)
    keep(dlm_scheduler_run(&scheduler, 1, nullptr, nullptr, nullptr,
                           0));  // continues with the remaining requests
  for (const Owned<dlm_job>& job : jobs) {
    if (job == nullptr) continue;
    stop_failing();
    if (dlm_job_wait(job.get(), 0) == 0) return {DLM_INTERNAL, "a job that nobody ends"};
    const dlm_result* result = nullptr;
    const dlm_status status = dlm_job_result(job.get(), &result);
    keep(status);
    if (result->length == 0) return {DLM_INTERNAL, "a job without a canvas"};
    if (status == DLM_OK) came.result += told(*result);
  }
  if (came.status != DLM_OK) came.result.clear();
  return came;
}

void sweep_scheduler(long stride) {
  for (const auto bundle_of : {bundle_of_callback, bundle_that_shares}) {
    const Owned<dlm_bundle> bundle = bundle_of();
    const auto create = [&](dlm_scheduler** out) {
      return dlm_scheduler_create(bundle.get(), nullptr, nullptr, 0, out);
    };
    sweep(
        "dlm_scheduler_create", stride, [] { return 0; },
        [&](int) {
          dlm_scheduler* scheduler = nullptr;
          const dlm_status status = create(&scheduler);
          const Owned<dlm_scheduler> owned(scheduler);
          return Came{status, ""};
        });
    for (const bool is_guided : {false, true}) {
      const dlm_policy chosen = policy(is_guided);
      sweep(
          "dlm_scheduler_submit and run", stride, [&] { return made<dlm_scheduler>(create); },
          [&](auto& scheduler) { return schedule(*scheduler, chosen); });
    }
  }
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Came rendered(const dlm_text* text) {
  const dlm_message chat[] = {{"user", "how are you?", 12}};
  char out[512];
  size_t size = 0;
  dlm_status status = dlm_chat_render(text, chat, 1, nullptr, 0, out, sizeof out, &size);
  int32_t ids[64];
  size_t count = 0;
  if (status == DLM_OK) status = dlm_chat_encode(text, chat, 1, 0, nullptr, 0, ids, 64, &count);
  stop_failing();
  return {status, status == DLM_OK ? std::string(out, size) + shown(ids, count) : ""};
}

Came decoded(const dlm_text* text) {
  const int32_t ids[] = {3, 90, 100, 7};
  char out[256];
  size_t whole = 0;
  const dlm_status status = dlm_text_decode(text, ids, 4, nullptr, 0, out, sizeof out, &whole);
  stop_failing();
  return {status, status == DLM_OK ? std::string(out, whole) : ""};
}

Came encoded(const dlm_text* text) {
  int32_t ids[64];
  size_t count = 0;
  const dlm_status status =
      dlm_text_encode(text, "turn on the e\xCC\x81 lights", 21, 1, nullptr, 0, ids, 64, &count);
  stop_failing();
  return {status, status == DLM_OK ? shown(ids, count) : ""};
}

// Opens the bundle in `folder` without an engine, and then gives the bundle a fake engine.
void sweep_files(long stride, const std::string& folder) {
  dlm_open_options options;
  dlm_open_options_init(&options, sizeof options);
  options.engine = "none", options.check_hashes = 0;  // hashing takes time, but no memory
  const auto open = [&](dlm_bundle** out) {
    return dlm_bundle_open(folder.c_str(), &options, nullptr, 0, out);
  };
  sweep(
      "dlm_bundle_open", 7 * stride, [] { return 0; },
      // Makes only some allocations fail, because parsing a manifest makes thousands of them.
      [&](int) {
        dlm_bundle* bundle = nullptr;
        const dlm_status status = open(&bundle);
        const Owned<dlm_bundle> owned(bundle);
        stop_failing();
        const dlm_bundle_info* const info = dlm_bundle_describe(bundle);
        return Came{status, info == nullptr ? "" : info->engine};
      });
  const std::string nowhere = folder + "/nowhere";
  sweep(
      "a bundle that is not there", stride, [] { return 0; },
      [&](int) {
        dlm_bundle* bundle = nullptr;
        return Came{dlm_bundle_open(nowhere.c_str(), nullptr, nullptr, 0, &bundle), ""};
      },
      DLM_NOT_FOUND);
  const Owned<dlm_bundle> bundle = made<dlm_bundle>(open);
  dlm_policy filled;
  dlm_policy_init(&filled, sizeof filled);
  sweep(
      "dlm_bundle_policy", stride, [] { return 0; },
      [&](int) {
        return Came{dlm_bundle_policy(bundle.get(), "no such preset as this one", nullptr, nullptr,
                                      0, &filled),
                    ""};
      },
      DLM_NOT_FOUND);
  const std::string file = content(bundle->manifest.text_path);
  sweep(
      "dlm_text_read", stride, [] { return 0; },
      [&](int) {
        dlm_text* text = nullptr;
        const dlm_status status = dlm_text_read(file.data(), file.size(), nullptr, 0, &text);
        const Owned<dlm_text> owned(text);
        return Came{status, ""};
      });
  sweep(
      "dlm_bundle_text", stride, [&] { return made<dlm_bundle>(open); },
      [&](auto& opened) {
        const dlm_text* text = nullptr;
        const dlm_status status = dlm_bundle_text(opened.get(), nullptr, 0, &text);
        return status == DLM_OK ? encoded(text) : Came{status, ""};
      });
  const dlm_text* text = nullptr;
  check(dlm_bundle_text(bundle.get(), nullptr, 0, &text) == DLM_OK, "dlm_bundle_text", -1, "fails");
  for (const auto ask : {encoded, decoded, rendered})
    sweep("text", stride, [] { return 0; }, [&](int) { return ask(text); }, ask(text).status);
  sweep(
      "text that is none", stride, [] { return 0; },
      [&](int) {
        size_t count = 0;
        return Came{dlm_text_encode(text, "a\xFF", 2, 0, nullptr, 0, nullptr, 0, &count), ""};
      },
      DLM_INVALID_ARGUMENT);

  // Tests a request whose prompt and result are texts. The fake denoiser has the vocabulary of the
  // text file.
  bundle->manifest.denoiser = dlm::check_denoiser(denoiser());
  bundle->engine = dlm::make_callback(run, nullptr, bundle->manifest.denoiser);
  const dlm_policy chosen = policy(false);
  const char* const stops[] = {"a stop string that does not occur"};
  dlm_request wanted = request_of(chosen);
  wanted.tokens = nullptr, wanted.token_count = 0, wanted.prompt = "!", wanted.prompt_size = 1;
  wanted.stop_strings = stops, wanted.text = DLM_TEXT_STEPS, wanted.stop_count = 1;
  sweep(
      "from text to text", stride, [&] { return session_of(*bundle); },
      [&](auto& session) { return generate(*session, wanted); });
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return try_to_allocate(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return try_to_allocate(bytes);
}
void operator delete(void* pointer, const std::nothrow_t&) noexcept { std::free(pointer); }
void operator delete[](void* pointer, const std::nothrow_t&) noexcept { std::free(pointer); }
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete[](void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { std::free(pointer); }

int main(int argc, char** argv) {
  const long stride = argc > 1 ? std::atol(argv[1]) : 1;
  if (stride < 1) return 2;
  sweep_sessions(stride);
  sweep_constraints(stride);
  sweep_scheduler(stride);
  if (argc > 2) sweep_files(stride, argv[2]);
  std::printf("%d allocations failed, %d claims did\n", failures, wrong);
  return wrong == 0 && failures > 20 ? 0 : 1;
}
