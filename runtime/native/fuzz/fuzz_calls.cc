// A fuzz target that calls the functions of the C ABI in any order. The denoiser is a callback.
// Handles are valid or NULL, policies and options can have any values, and buffers are short. Some
// callbacks fail, and some call the C ABI.
//
// Each byte of the input makes a choice. The first bytes choose a denoiser, and all later bytes
// choose calls and their arguments.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInfinite = std::numeric_limits<double>::infinity();
constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 7, 16, 31, -1, 1 << 24, INT32_MAX, INT32_MIN};
constexpr double kReals[] = {0, 0.5, 1,     0.9,  0.3,       1e-3,      -1,
                             2, 1e9, 1e300, kNan, kInfinite, -kInfinite};
constexpr const char* kStrings[] = {
    nullptr,     "",        "sample",        "margin",        "entropy",  "random",
    "threshold", "dynamic", "factor",        "entropy_bound", "timestep", "sequential",
    ">",         "edit",    "prefix",        "dual",          "block",    "block-dual",
    "none",      "reuse",   "draw",          "marginal",      "floor",    "end",
    "noise",     "rewrite", "no such %s\x1b"};
constexpr dlm_status kOwn = 77;  // the status that a pass callback returns when it fails
constexpr size_t kMostCalls = 48, kRoom = 80;
constexpr const char* kStops[] = {"bc", "\xC3\xA9"};

class World {
 public:
  explicit World(fuzz::Input& input) : input_(input) {}
  ~World() {
    for (dlm_job* const job : jobs_) dlm_job_destroy(job);
    dlm_scheduler_destroy(scheduler_);
    dlm_session_destroy(session_);
    dlm_bundle_destroy(bundle_);
  }

  void run() {
    make_bundle();
    for (size_t calls = 0; calls < kMostCalls && !input_.is_empty(); ++calls) call(input_.byte());
  }

 private:
  int32_t number() { return input_.pick(kNumbers); }
  double real() { return input_.pick(kReals); }
  dlm_session* session() { return input_.byte() % 16 == 15 ? nullptr : session_; }
  bool is_rare() { return input_.byte() % 32 == 31; }

  // Checks the status of a call. If the call on a session failed, the session must have an error
  // message.
  dlm_status check(dlm_status status) {
    CLAIM(status == DLM_OK || fuzz::is_refusal(status) || status == kOwn);
    return status;
  }
  dlm_status check(dlm_session* of, dlm_status status) {
    const char* const said = dlm_session_last_error(of);
    CLAIM(status == DLM_OK ? *said == '\0' : fuzz::is_sentence(said));
    return check(status);
  }

  void make_bundle() {
    const uint8_t kind = input_.byte();
    const int32_t eos[] = {1, kind % 16 == 15 ? number() : 2};
    dlm_denoiser denoiser;
    dlm_denoiser_init(&denoiser, sizeof denoiser);
    vocab_ = 3 + kind % 11;
    denoiser.vocab_size = vocab_, denoiser.mask_token_id = 0, denoiser.max_canvas_length = 64;
    denoiser.layers = 1 + kind % 2, denoiser.kv_heads = 1 + kind / 2 % 2, denoiser.head_size = 2;
    denoiser.shift = kind / 4 % 2, denoiser.has_cache = kind / 8 % 2;
    denoiser.eos_count = static_cast<size_t>(kind / 16 % 3);
    denoiser.eos_token_ids = denoiser.eos_count > 0 || is_rare() ? eos : nullptr;
    denoiser.visible_block = kind / 64 == 3 ? 8 : 0;
    if (kind / 32 == 7) denoiser.delete_token_id = 1, denoiser.split_token_id = 2;
    if (is_rare()) (&denoiser.vocab_size)[input_.byte() % 10] = number() > 1 << 20 ? -1 : number();
    // larger denoisers would be slow
    if (denoiser.vocab_size > 64 || denoiser.max_canvas_length > 64) return;
    if (denoiser.vocab_size >= 3) vocab_ = denoiser.vocab_size;
    top_k_ = denoiser.top_k, mask_ = denoiser.mask_token_id;
    if (is_rare()) denoiser.struct_size = input_.byte();
    char message[512] = "";
    const dlm_status status =
        dlm_bundle_from_callback(&denoiser, &World::pass, this, message, sizeof message, &bundle_);
    CLAIM(check(status) == DLM_OK || fuzz::is_sentence(message));
    dlm_session_create(bundle_, message, sizeof message, &session_);
    dlm_scheduler_options options;
    dlm_scheduler_options_init(&options, sizeof options);
    options.max_running = 1 + kind % 3, options.max_waiting = 4;
    if (is_rare()) options.max_tokens = number();
    if (is_rare()) options.cache_bytes = input_.byte() * 64u;
    check(dlm_scheduler_create(bundle_, &options, message, sizeof message, &scheduler_));
  }

  dlm_policy policy() {
    dlm_policy made;
    dlm_policy_init(&made, sizeof made);
    static const size_t fields = [] {
      size_t count = 0;
      while (dlm_policy_field_at(count) != nullptr) ++count;
      return count;
    }();
    for (size_t changes = input_.byte() % 6; changes-- > 0;) {
      const dlm_policy_field* const field = dlm_policy_field_at(input_.byte() % fields);
      void* const at = reinterpret_cast<char*>(&made) + field->offset;
      const int32_t choices = field->choices == nullptr ? 0 : [&] {
        int32_t n = 0;
        while (field->choices[n] != nullptr) ++n;
        return n;
      }();
      const uint8_t drawn = input_.byte();
      const char* const choice = choices == 0 || drawn % 16 == 15
                                     ? kStrings[drawn % std::size(kStrings)]
                                     : field->choices[drawn % choices];
      const int32_t whole = kNumbers[drawn % std::size(kNumbers)];
      const double part = kReals[drawn % std::size(kReals)];
      if (field->kind == DLM_FIELD_CHOICE)
        std::memcpy(at, &choice, sizeof choice);
      else if (field->kind == DLM_FIELD_INT32)
        std::memcpy(at, &whole, sizeof whole);
      else if (field->kind == DLM_FIELD_DOUBLE)
        std::memcpy(at, &part, sizeof part);
    }
    if (is_rare()) made.struct_size += input_.byte() % 9u - 4u;
    return made;
  }

  dlm_request request() {
    dlm_request made;
    dlm_request_init(&made, sizeof made);
    tokens_.resize(fill());
    if (!tokens_.empty()) made.tokens = tokens_.data(), made.token_count = tokens_.size();
    policy_ = policy();
    if (!is_rare()) made.policy = &policy_;
    made.max_new_tokens = input_.byte() % 24;
    if (is_rare()) made.max_new_tokens = number();
    if (is_rare()) made.steps = number();
    if (is_rare()) made.max_steps = number();
    if (is_rare()) made.deadline_ms = real();
    if (is_rare()) made.text = number();
    if (is_rare()) made.text_start = number();
    if (is_rare()) made.constrained_tokens = number();
    if (input_.byte() % 4 == 3)
      made.text = DLM_TEXT_STEPS, made.decode = &World::decode, made.user = this;
    if (input_.byte() % 8 == 7)
      made.stop_strings = kStops, made.stop_count = 1 + input_.byte() % 2,
      made.decode = &World::decode, made.user = this;
    if (input_.byte() % 4 == 3) made.on_step = &World::on_step, made.user = this;
    if (is_rare()) made.struct_size = input_.byte();
    return made;
  }

  // Fills `tokens_` with a prompt of up to 19 tokens, and returns the number of tokens. In rare
  // cases, the first token is outside the vocabulary.
  size_t fill() {
    const size_t count = input_.byte() % 20;
    tokens_.resize(count);
    for (size_t i = 0; i < count; ++i)
      tokens_[i] = input_.byte() % 4 == 0 ? 0 : input_.byte() % vocab_;
    if (count > 0 && is_rare()) tokens_[0] = number();
    return count;
  }

  void call(uint8_t which) {
    char message[64];
    switch (which % 16) {
      case 0:
      case 1:
        generate();
        break;
      case 2:
        batch();
        break;
      case 3: {
        const dlm_request chosen = request();
        dlm_session* const of = session();
        check(of, dlm_session_start(of, is_rare() ? nullptr : &chosen));
        break;
      }
      case 4:
      case 5: {
        const dlm_step* step = nullptr;
        dlm_session* const of = session();
        if (check(of, dlm_session_step(of, is_rare() ? nullptr : &step)) == DLM_OK)
          for (int32_t i = 0; i < step->length; ++i)
            CLAIM(step->canvas[i] >= 0 && step->canvas[i] < vocab_ && step->guess[i] < vocab_);
        break;
      }
      case 6: {
        const dlm_result* result = nullptr;
        dlm_session* const of = session();
        const dlm_status status = check(of, dlm_session_result(of, input_.byte() % 4, &result));
        CLAIM((result != nullptr) == (status == DLM_OK));
        break;
      }
      case 7:
        dlm_session_cancel(session(), is_rare() ? DLM_ALL_REQUESTS : input_.byte() % 4);
        break;
      case 8: {
        float logits[kRoom];
        const int32_t rows[] = {number(), number()};
        const size_t capacity = input_.byte() % kRoom;
        dlm_session* const of = session();
        fill();
        check(of, dlm_session_logits(of, tokens_.data(), tokens_.size(), rows, input_.byte() % 3,
                                     logits, capacity));
        break;
      }
      case 9: {
        double seconds[2];
        dlm_session* const of = session();
        const auto few = [&] {
          const int32_t drawn = number();
          return drawn > 100 && drawn < INT32_MAX ? 9 : drawn;
        };
        check(of,
              dlm_session_time_passes(of, few(), few(), few(), few(), seconds, input_.byte() % 3));
        break;
      }
      case 10:
        check(session_,
              dlm_session_before_pass(
                  session_, input_.byte() % 2 == 0 ? nullptr : &World::before_pass, this));
        break;
      case 11:
      case 12: {
        const dlm_request chosen = request();
        dlm_job* job = nullptr;
        check(dlm_scheduler_submit(is_rare() ? nullptr : scheduler_, &chosen, message,
                                   sizeof message, is_rare() ? nullptr : &job));
        if (job != nullptr) jobs_.push_back(job);
        break;
      }
      case 13:
        check(dlm_scheduler_run(scheduler_, 1,
                                input_.byte() % 4 == 0 ? &World::before_pass : nullptr, this,
                                message, sizeof message));
        break;
      case 14:
        ask_job();
        break;
      default: {
        dlm_scheduler_stats stats;
        dlm_scheduler_get_stats(scheduler_, &stats,
                                is_rare() ? input_.byte() % sizeof stats : sizeof stats);
        if (input_.byte() % 8 == 0) dlm_scheduler_stop(scheduler_);
        if (is_rare())
          dlm_session_destroy(session_),
              session_ = nullptr, dlm_session_create(bundle_, message, sizeof message, &session_);
      }
    }
  }

  void generate() {
    const dlm_request chosen = request();
    dlm_session* const of = session();
    const dlm_result* result = nullptr;
    const dlm_status status =
        check(of, dlm_session_generate(of, &chosen, is_rare() ? nullptr : &result));
    if (result == nullptr) return;
    CLAIM(result->status == status && result->length >= tokens_.size());
    if (status != DLM_OK) return;
    for (size_t i = 0; i < result->length; ++i)
      CLAIM(result->tokens[i] >= 0 && result->tokens[i] < vocab_ &&
            (i >= tokens_.size() || tokens_[i] == mask_ || tokens_[i] == result->tokens[i]));
  }

  void batch() {
    std::array<dlm_request, 3> made{};
    std::array<std::vector<int32_t>, 3> tokens;
    std::array<dlm_policy, 3> policies{};
    std::array<const dlm_request*, 3> requests{};
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = request();
      tokens[i] = tokens_, made[i].tokens = tokens[i].data();
      policies[i] = policy_;
      if (made[i].policy != nullptr) made[i].policy = &policies[i];
      requests[i] = is_rare() ? nullptr : &made[i];
    }
    dlm_session* const of = session();
    check(of, dlm_session_generate_batch(of, requests.data(), input_.byte() % 4,
                                         is_rare() ? number() : 2));
  }

  void ask_job() {
    dlm_job* const job = jobs_.empty() || is_rare() ? nullptr : jobs_[input_.byte() % jobs_.size()];
    const dlm_result* result = nullptr;
    const bool is_done = dlm_job_wait(job, is_rare() ? kNan : 0) != 0;
    const dlm_status status = check(dlm_job_result(job, &result));
    CLAIM((result != nullptr) == is_done && (is_done || status == DLM_INVALID_ARGUMENT));
    CLAIM(!is_done || status == DLM_OK || fuzz::is_sentence(result->message));
    if (input_.byte() % 2 == 0) dlm_job_cancel(job);
    if (job == nullptr || input_.byte() % 4 != 0) return;
    dlm_job_destroy(job);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
  }

  // Calls the session from a callback. The calls that are allowed in a callback must succeed, and
  // all other calls must fail.
  int32_t call_back() {
    const uint8_t what = input_.byte();
    if (what % 16 == 1) dlm_session_cancel(session_, 0);
    if (what % 16 == 2) CLAIM(dlm_session_step(session_, nullptr) == DLM_INVALID_ARGUMENT);
    if (what % 16 == 3) dlm_scheduler_stop(scheduler_);
    return what % 16 == 4;
  }
  static int32_t before_pass(void* user) { return static_cast<World*>(user)->call_back(); }
  static int32_t on_step(void* user, const dlm_step* step) {
    CLAIM(step->length > 0 && step->block_start <= step->block_end && step->nfe >= 0);
    return static_cast<World*>(user)->call_back();
  }

  // Decodes each token to a character of one to three bytes. In rare cases, appends a byte that is
  // not valid UTF-8.
  static dlm_status decode(void* user, const int32_t* tokens, size_t count, char* string,
                           size_t capacity, size_t* size) {
    World& world = *static_cast<World*>(user);
    constexpr const char* kTexts[] = {"a", "b", "c", "\xC3\xA9", "\xEF\xBF\xBD"};
    std::string text;
    for (size_t i = 0; i < count; ++i) text += kTexts[static_cast<size_t>(tokens[i]) % 5];
    if (world.input_.byte() % 64 == 63) text += "\xFF";  // invalid UTF-8
    *size = text.size();
    if (capacity > 0) std::memcpy(string, text.data(), std::min(capacity, text.size()));
    return world.input_.byte() % 64 == 63 ? kOwn : DLM_OK;
  }

  static dlm_status pass(void* user, const dlm_pass* pass) {
    World& world = *static_cast<World*>(user);
    const uint8_t what = world.input_.byte();
    // Reads all memory that a pass may read, and writes all memory that a pass may write.
    for (int32_t layer = 0; layer < pass->layers; ++layer) {
      if (pass->cached > 0) world.seen_ += *static_cast<const uint8_t*>(pass->past_keys[layer]);
      if (pass->present_keys != nullptr) *static_cast<uint8_t*>(pass->present_keys[layer]) = what;
    }
    for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
      for (int32_t k = 0; k < world.top_k_; ++k) {
        pass->top_tokens[world.top_k_ * row + k] = 1 + (what + row + k) % (world.vocab_ - 1);
        pass->top_probs[world.top_k_ * row + k] = 0.6f / static_cast<float>(k + 1);
      }
      if (pass->entropy != nullptr) pass->entropy[row] = -0.5f;
      for (int32_t v = 0; pass->logits != nullptr && v < world.vocab_; ++v)
        pass->logits[row * world.vocab_ + v] = v == pass->top_tokens[world.top_k_ * row]
                                                   ? 9.0f
                                                   : static_cast<float>((v * 5 + what) % 7);
    }
    if (pass->rows > 0 && what % 32 == 31) pass->top_tokens[0] = world.input_.pick(kNumbers);
    if (pass->rows > 0 && what % 32 == 30)
      pass->top_probs[0] = static_cast<float>(world.input_.pick(kReals));
    if (pass->rows > 0 && what % 32 == 29 && pass->logits != nullptr)
      pass->logits[0] = static_cast<float>(world.input_.pick(kReals));
    return what % 32 == 28 ? DLM_ENGINE_FAILED : what % 64 == 27 ? kOwn : DLM_OK;
  }

  fuzz::Input& input_;
  dlm_bundle* bundle_ = nullptr;
  dlm_session* session_ = nullptr;
  dlm_scheduler* scheduler_ = nullptr;
  std::vector<dlm_job*> jobs_;
  dlm_policy policy_{};
  std::vector<int32_t> tokens_;
  int32_t vocab_ = 3, top_k_ = 2, mask_ = 0;
  uint64_t seen_ = 0;
};

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  World(input).run();
  return 0;
}
