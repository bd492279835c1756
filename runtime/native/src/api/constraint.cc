// The C ABI of constraints: compiles, reads and writes constraints.
#include "compile/constraint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "base/sha256.h"

using dlm::guarded, dlm::require;

namespace {

dlm_constraint default_constraint() {
  const dlm::compile::Limits limits;
  dlm_constraint constraint{};
  constraint.struct_size = sizeof constraint;
  constraint.item_separator = ",";
  constraint.key_separator = ":";
  constraint.indent = constraint.max_depth = -1;
  constraint.seconds = limits.seconds;
  constraint.memory_bytes = limits.memory_bytes;
  constraint.states = static_cast<int64_t>(limits.states);
  constraint.edges = static_cast<int64_t>(limits.edges);
  return constraint;
}

constexpr int32_t kMostTokens = 1 << 24;

std::string text_or_none(const char* text) { return text == nullptr ? "" : text; }

dlm::compile::Constraint read_constraint(const dlm_constraint& given) {
  constexpr int32_t kMostIndent = 64, kMostDepth = 64;
  dlm::compile::Constraint out;
  dlm::check_range("kind", given.kind, DLM_CONSTRAINT_REGEX, DLM_CONSTRAINT_DECISIONS);
  dlm::check_range("indent", given.indent, -1, kMostIndent);
  dlm::check_range("has_lines", given.has_lines, 0, 1);
  dlm::check_range("max_depth", given.max_depth, -1, kMostDepth);
  dlm::check_range("any_order", given.any_order, 0, 1);
  dlm::check_range("more_properties", given.more_properties, 0, 1);
  out.kind = static_cast<dlm::compile::Constraint::Kind>(given.kind);
  // "" is a useful content only for a kind that has no content.
  if (given.kind == DLM_CONSTRAINT_JSON_OBJECT)
    dlm::check_count(given.content, given.content_size, "content");
  else
    dlm::check_pair(given.content, given.content_size, "content", "content_size");
  out.content = {given.content, given.content_size};
  out.before = text_or_none(given.before);
  out.behind = text_or_none(given.behind);
  out.layout.item_separator = text_or_none(given.item_separator);
  out.layout.key_separator = text_or_none(given.key_separator);
  out.layout.indent = given.indent;
  out.layout.has_lines = given.has_lines != 0;
  if (given.max_depth >= 0) out.max_depth = static_cast<uint32_t>(given.max_depth);
  out.any_order = given.any_order != 0;
  out.more_properties = given.more_properties != 0;
  if (!(given.seconds >= 0) || given.states < 0 || given.edges < 0)
    dlm::fail(DLM_INVALID_ARGUMENT, "a compile limit is negative");
  out.limits = {given.seconds, given.memory_bytes, static_cast<size_t>(given.states),
                static_cast<size_t>(given.edges)};
  return out;
}

using VocabularyPointer = std::shared_ptr<const dlm::compile::Vocabulary>;

VocabularyPointer given_vocabulary(const dlm_bundle* bundle, const dlm_constraint& given) {
  int32_t vocab_size = given.vocab_size;
  std::vector<int32_t> ends;
  if (bundle != nullptr) {
    vocab_size = bundle->manifest.denoiser.vocab_size;
    ends = bundle->manifest.denoiser.eos_token_ids;
  } else {
    dlm::check_range("vocab_size", vocab_size, 1, kMostTokens);
    if (given.eos_count > 0) require(given.eos_token_ids, "eos_token_ids");
    if (given.eos_count > static_cast<size_t>(vocab_size))
      dlm::fail(DLM_INVALID_ARGUMENT, "eos_count = %zu is more than vocab_size", given.eos_count);
    ends.assign(given.eos_token_ids, given.eos_token_ids + given.eos_count);
  }
  std::vector<std::string> tokens(std::min(given.token_count, static_cast<size_t>(vocab_size)));
  for (size_t i = 0; i < tokens.size(); ++i)
    if (given.tokens[i] != nullptr) tokens[i].assign(given.tokens[i], given.token_sizes[i]);
  std::vector<std::string> starts(given.start_tokens == nullptr ? 0 : tokens.size());
  for (size_t i = 0; i < starts.size(); ++i)
    if (given.start_tokens[i] != nullptr)
      starts[i].assign(given.start_tokens[i], given.start_token_sizes[i]);
  dlm::compile::Vocabulary::FirstToken first_token;
  if (given.first_token != nullptr)
    first_token = [ask = given.first_token, user = given.user](std::string_view text, bool) {
      return ask(user, text.data(), text.size());
    };
  return std::make_shared<const dlm::compile::Vocabulary>(
      std::move(tokens), std::move(starts), vocab_size, std::move(ends), std::move(first_token));
}

// Returns the hash of the vocabulary that the program passes. If the vocabulary contains a
// callback, the hash includes only the address of the callback. The library calls the callback only
// during the C call that received the vocabulary.
std::array<uint8_t, 32> hash_of_vocabulary(const dlm_constraint& given) {
  dlm::Sha256 hash;
  const auto add = [&](const auto& value) { hash.update(&value, sizeof value); };
  add(given.first_token);
  add(given.user);
  add(given.token_count);
  const auto add_texts = [&](const char* const* texts, const size_t* sizes) {
    for (size_t i = 0; texts != nullptr && i < given.token_count; ++i) {
      const size_t size = texts[i] == nullptr ? SIZE_MAX : sizes[i];
      add(size);
      if (texts[i] != nullptr) hash.update(texts[i], size);
    }
  };
  add_texts(given.tokens, given.token_sizes);
  add_texts(given.start_tokens, given.start_token_sizes);
  return hash.digest();
}

// Indexing a vocabulary takes longer than compiling a small constraint. So the bundle keeps the
// index of the last vocabulary that the program passed, and uses it again if the next vocabulary
// has the same hash.
VocabularyPointer kept_vocabulary(dlm_bundle& bundle, const dlm_constraint& given) {
  const std::array<uint8_t, 32> hash = hash_of_vocabulary(given);
  const std::lock_guard<std::mutex> lock(bundle.vocabulary_mutex);
  if (bundle.given_vocabulary == nullptr || bundle.given_hash != hash) {
    bundle.given_vocabulary = given_vocabulary(&bundle, given);
    bundle.given_hash = hash;
  }
  return bundle.given_vocabulary;
}

VocabularyPointer vocabulary_of(dlm_bundle& bundle) {
  const dlm::Denoiser& denoiser = bundle.manifest.denoiser;
  const std::shared_ptr<const dlm::Text> text = dlm::text_of(bundle).text;
  const std::lock_guard<std::mutex> lock(bundle.vocabulary_mutex);
  if (bundle.vocabulary == nullptr)
    bundle.vocabulary =
        dlm::compile::read_vocabulary(text, denoiser.vocab_size, denoiser.eos_token_ids);
  return bundle.vocabulary;
}

dlm_automaton* made(dlm::Automaton automaton, const std::vector<std::string>& warnings) {
  auto out = std::make_unique<dlm_automaton>();
  for (const std::string& warning : warnings)
    out->warnings += (out->warnings.empty() ? "" : "\n") + warning;
  dlm_automaton_info& info = out->info;
  info.struct_size = sizeof info;
  info.shortest = automaton.distances.front();
  info.states = automaton.states;
  info.classes = automaton.classes;
  info.groups = automaton.groups;
  info.edges = static_cast<int32_t>(automaton.edge_states.size());
  info.warnings = out->warnings.c_str();
  out->automaton = std::make_shared<const dlm::Automaton>(std::move(automaton));
  return out.release();
}

// Reads an automaton that the program compiled and stored earlier.
dlm_automaton* read(const dlm_constraint& given) {
  require(given.content, "content");
  const std::string_view content = dlm::view_of(given.content, given.content_size, "content");
  if (given.kind == DLM_CONSTRAINT_FILE) return made(dlm::open_automaton(std::string(content)), {});
  return made(dlm::read_automaton(content.data(), content.size(), "the constraint"), {});
}

}  // namespace

void dlm_constraint_init(dlm_constraint* constraint, size_t struct_size) {
  dlm::give(default_constraint(), struct_size, constraint);
}

dlm_status dlm_automaton_compile(dlm_bundle* bundle, const dlm_constraint* constraint,
                                 char* message, size_t message_capacity,
                                 dlm_automaton** automaton) {
  if (automaton != nullptr) *automaton = nullptr;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(constraint, "constraint");
    const dlm_constraint given = dlm::take(*constraint, default_constraint(), "dlm_constraint");
    if (given.kind == DLM_CONSTRAINT_COMPILED || given.kind == DLM_CONSTRAINT_FILE) {
      *automaton = read(given);
      return;
    }
    const dlm::compile::Constraint wanted = read_constraint(given);
    dlm::check_pair(given.tokens, given.token_count, "tokens", "token_count");
    dlm::check_count(given.token_sizes, given.token_count, "token_sizes");
    if (given.start_tokens != nullptr) {
      require(given.tokens, "tokens");
      require(given.start_token_sizes, "start_token_sizes");
    }
    if (given.tokens == nullptr) require(bundle, "bundle");
    const VocabularyPointer vocabulary = given.tokens == nullptr ? vocabulary_of(*bundle)
                                         : bundle == nullptr     ? given_vocabulary(nullptr, given)
                                                                 : kept_vocabulary(*bundle, given);
    dlm::compile::Compiled compiled = dlm::compile::compile_constraint(wanted, *vocabulary);
    if (given.made_of != nullptr)
      std::copy_n(given.made_of, sizeof compiled.automaton.made_of,
                  compiled.automaton.made_of.begin());
    *automaton = made(std::move(compiled.automaton), compiled.warnings);
  });
}

dlm_status dlm_automaton_write(const dlm_automaton* automaton, char* message,
                               size_t message_capacity, void* data, size_t capacity, size_t* size) {
  if (size != nullptr) *size = 0;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(size, "size");
    if (capacity > 0) require(data, "data");
    if (automaton->automaton->options() > 0)
      dlm::fail(DLM_UNSUPPORTED, "decisions cannot be stored: compile them where they are used");
    *size = dlm::file_size(*automaton->automaton);
    if (capacity == 0) return;
    const std::vector<uint8_t> file = dlm::write_automaton(*automaton->automaton);
    std::memcpy(data, file.data(), std::min(capacity, file.size()));
  });
}

void dlm_automaton_destroy(dlm_automaton* automaton) { delete automaton; }

const dlm_automaton_info* dlm_automaton_describe(const dlm_automaton* automaton) {
  return automaton == nullptr ? nullptr : &automaton->info;
}
