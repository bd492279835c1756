// A fuzz target that reads an automaton file, and runs requests with this automaton as their
// constraint. Each request must end with a text that the automaton accepts, or with an error
// message.
//
// The input consists of four bytes that select the request, and the automaton file without its
// SHA-256. If the file is a little shorter than its header says, the target adds the missing data.
// Then the target appends the SHA-256.
#include <algorithm>
#include <vector>

#include "base/sha256.h"
#include "fuzz.h"

namespace {

constexpr size_t kChosen = 4, kHeader = 8 + 6 * 4 + 32;
constexpr int32_t kMostVocab = 512;

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

dlm_status run(void* user, const dlm_pass* pass) {
  const auto vocab = static_cast<uint64_t>(*static_cast<int32_t*>(user));
  for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
    const uint64_t word =
        mix(static_cast<uint64_t>(pass->position_ids[pass->score_rows[row]]) * 31 +
            static_cast<uint64_t>(row));
    pass->top_tokens[2 * row] = static_cast<int32_t>(word % (vocab - 2)),
                         pass->top_tokens[2 * row + 1] = static_cast<int32_t>(vocab - 2);
    pass->top_probs[2 * row] = 0.6f, pass->top_probs[2 * row + 1] = 0.2f;
    if (pass->entropy != nullptr) pass->entropy[row] = -0.5f;
    for (uint64_t v = 0; pass->logits != nullptr && v < vocab; ++v)
      pass->logits[static_cast<uint64_t>(row) * vocab + v] =
          v == word % (vocab - 2) ? 9 : static_cast<float>(mix(word + v) % 64) / 8;
  }
  return DLM_OK;
}

dlm_policy choose(fuzz::Input& input) {
  static constexpr const char* kCommits[] = {
      "static", "threshold", "dynamic", "factor", "entropy_bound", "sequential", "longest_prefix"};
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy);
  const uint8_t bits = input.byte();
  policy.commit = input.pick(kCommits);
  if ((bits & 1) != 0)
    policy.select = "sample", policy.temperature = 0.8, policy.top_p = (bits & 2) != 0 ? 0.7 : 1;
  if ((bits & 4) != 0)
    policy.score_of = "marginal", policy.score = (bits & 2) != 0 ? "entropy" : "margin";
  if ((bits & 8) != 0) policy.block_length = 5;
  if ((bits & 16) != 0) policy.cache = "dual";
  if ((bits & 32) != 0) policy.top_k = (bits & 1) != 0 ? 3 : 0;
  return policy;
}

// Appends data until the file is as long as its header says.
std::string complete(std::string_view given) {
  std::string file(given);
  int32_t sizes[6];
  if (file.size() >= kHeader) {
    std::memcpy(sizes, file.data() + 8, sizeof sizes);
    const auto [vocab, states, classes, groups, members, edges] = sizes;
    uint64_t numbers = 2;
    for (const int32_t count : {vocab, groups, members, states, states, edges, edges})
      numbers += static_cast<uint64_t>(std::max(count, 0));
    if (numbers < 1 << 14) file.resize(kHeader + numbers * 4);
  }
  dlm::Sha256 hash;
  hash.update(file.data(), file.size());
  const auto digest = hash.digest();
  return file.append(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size),
      settings(reinterpret_cast<const uint8_t*>(input.text(kChosen).data()),
               std::min(size, kChosen));
  const std::string file = complete(input.rest());
  char message[512];
  dlm_automaton* automaton = nullptr;
  dlm_constraint constraint;
  dlm_constraint_init(&constraint, sizeof constraint);
  constraint.kind = DLM_CONSTRAINT_COMPILED;
  constraint.content = file.data(), constraint.content_size = file.size();
  const dlm_status status =
      dlm_automaton_compile(nullptr, &constraint, message, sizeof message, &automaton);
  CLAIM(status == DLM_OK ? automaton != nullptr
                         : fuzz::is_refusal(status) && fuzz::is_sentence(message));
  if (status != DLM_OK) return 0;
  int32_t vocab;
  std::memcpy(&vocab, file.data() + 8, sizeof vocab);
  const int32_t eos = vocab - 2;
  dlm_denoiser denoiser;
  dlm_denoiser_init(&denoiser, sizeof denoiser);
  denoiser.vocab_size = vocab, denoiser.mask_token_id = vocab - 1, denoiser.max_canvas_length = 64;
  denoiser.layers = denoiser.kv_heads = denoiser.head_size = denoiser.has_cache = 1;
  denoiser.eos_token_ids = &eos, denoiser.eos_count = 1;
  dlm_bundle* bundle = nullptr;
  if (vocab >= 4 && vocab <= kMostVocab)
    CLAIM(dlm_bundle_from_callback(&denoiser, run, &vocab, message, sizeof message, &bundle) ==
          DLM_OK);
  if (bundle != nullptr) {
    const dlm_policy policy = choose(settings);
    const uint8_t lengths = settings.byte(), given = settings.byte();
    dlm_session* session = nullptr;
    CLAIM(dlm_session_create(bundle, message, sizeof message, &session) == DLM_OK);
    dlm_request request;
    dlm_request_init(&request, sizeof request);
    request.policy = &policy, request.max_new_tokens = lengths % 20;
    request.max_steps = given / 3 % 2 * 4;
    request.constraint = automaton, request.constrained_tokens = given % 3;
    int32_t tokens[4] = {};
    request.tokens = tokens, request.token_count = lengths / 20 % 4;
    for (int32_t& token : tokens) token = given / 6 % vocab;
    const dlm_result* result = nullptr;
    const dlm_status ended = dlm_session_generate(session, &request, &result);
    CLAIM(ended == DLM_OK ||
          (fuzz::is_refusal(ended) && fuzz::is_sentence(dlm_session_last_error(session))));
    for (size_t i = 0; ended == DLM_OK && i < result->length; ++i)
      CLAIM(result->tokens[i] >= 0 && result->tokens[i] < vocab);
    dlm_session_destroy(session);
  }
  dlm_automaton_destroy(automaton);
  dlm_bundle_destroy(bundle);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  return fuzz::mutate_numbers(data, size, max_size, seed % 8 == 1 ? 0 : kChosen, seed);
}
