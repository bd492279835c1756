// A fuzz target that compiles a constraint for a vocabulary. Compiling must end with an error
// message, or with an automaton whose texts satisfy the constraint. It must not exceed the limits
// for time, memory and the size of the automaton.
//
// The input starts with six bytes that choose the options. Then come four texts, each of which ends
// with a NUL: the content of the constraint, the fixed text before the generated text, the fixed
// text after it, and the tokens of the vocabulary.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "constraints/automaton.h"
#include "fuzz.h"

// GCC's sanitizers define these functions, but no header of GCC declares them.
extern "C" {
size_t __sanitizer_get_allocated_size(const volatile void* pointer);
int __sanitizer_install_malloc_and_free_hooks(void (*allocated)(const volatile void*, size_t),
                                              void (*freed)(const volatile void*));
}

namespace {

constexpr size_t kMostContent = 4096, kMostTokens = 64;
constexpr double kSeconds = 0.25;
constexpr size_t kMemory = 48 << 20;
constexpr int64_t kStates = 2000, kEdges = 100'000;
// Allowance for memory that the memory limit does not include: the vocabulary, the parsed JSON of
// the content, and the automaton.
constexpr size_t kOtherMemory = 32 << 20;
constexpr double kOtherSeconds = 0.25;

double processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The number of bytes that are allocated now, and the largest number so far.
std::atomic<int64_t> allocated{0}, most_allocated{0};

void count_new(const volatile void* pointer, size_t) {
  const auto size = static_cast<int64_t>(__sanitizer_get_allocated_size(pointer));
  const int64_t now = allocated.fetch_add(size) + size;
  if (now > most_allocated) most_allocated = now;
}

void count_freed(const volatile void* pointer) {
  if (pointer != nullptr)
    allocated -= static_cast<int64_t>(__sanitizer_get_allocated_size(pointer));
}

// The vocabulary that the program passes.
struct Tokens {
  std::vector<std::string> texts;
  uint8_t kind;  // selects what first_token() returns
};

int32_t first_token(void* user, const char* string, size_t size) {
  const auto& tokens = *static_cast<const Tokens*>(user);
  // The callback may return any number.
  if (tokens.kind == 1) return static_cast<int32_t>(size * 37 % 997) - 20;
  int32_t best = -1;
  for (size_t i = 0; i < tokens.texts.size(); ++i) {
    const std::string& token = tokens.texts[i];
    if (!token.empty() && std::string_view(string, size).substr(0, token.size()) == token &&
        (best < 0 || token.size() > tokens.texts[static_cast<size_t>(best)].size()))
      best = static_cast<int32_t>(i);
  }
  return best;
}

// Returns one of the shortest texts that the automaton accepts. Each step follows an edge to a
// state from which a shorter text is enough.
std::string shortest_text(const dlm::Automaton& automaton, const Tokens& tokens) {
  std::string text;
  size_t state = 0;
  while (automaton.distances[state] > 0) {
    size_t to = SIZE_MAX, group = 0;
    for (auto edge = static_cast<size_t>(automaton.edge_starts[state]);
         edge < static_cast<size_t>(automaton.edge_starts[state + 1]) && to == SIZE_MAX; ++edge) {
      const auto next = static_cast<size_t>(automaton.edge_states[edge]);
      if (automaton.distances[next] < automaton.distances[state])
        to = next, group = static_cast<size_t>(automaton.edge_groups[edge]);
    }
    CLAIM(to != SIZE_MAX);
    const auto chosen = automaton.group_classes[static_cast<size_t>(automaton.group_starts[group])];
    const auto token =
        std::find(automaton.token_class.begin(), automaton.token_class.end(), chosen);
    CLAIM(token != automaton.token_class.end());
    const auto id = static_cast<size_t>(token - automaton.token_class.begin());
    if (id < tokens.texts.size()) text += tokens.texts[id];
    state = to;
  }
  return text;
}

std::string written(const dlm_automaton* automaton) {
  char message[512];
  size_t size = 0;
  CLAIM(dlm_automaton_write(automaton, message, sizeof message, nullptr, 0, &size) == DLM_OK);
  std::string file(size, '\0');
  CLAIM(dlm_automaton_write(automaton, message, sizeof message, file.data(), size, &size) ==
        DLM_OK);
  return file;
}

bool is_json(std::string_view text) {
  try {
    dlm::json::parse(text, SIZE_MAX);
    return true;
  } catch (const dlm::Error&) {
    return false;
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool counts = __sanitizer_install_malloc_and_free_hooks(count_new, count_freed) > 0;
  CLAIM(counts);
  // The kinds of constraints that the library compiles.
  static constexpr int32_t kKinds[] = {DLM_CONSTRAINT_REGEX,    DLM_CONSTRAINT_SCHEMA,
                                       DLM_CONSTRAINT_ENUM,     DLM_CONSTRAINT_JSON_OBJECT,
                                       DLM_CONSTRAINT_TREE,     DLM_CONSTRAINT_GRAMMAR,
                                       DLM_CONSTRAINT_DECISIONS};
  static constexpr const char* kItemSeparators[] = {",", ", ", " , ", ";"};
  static constexpr const char* kKeySeparators[] = {":", ": ", " : ", "="};
  fuzz::Input input(data, size);
  const int32_t kind = kKinds[input.byte() % std::size(kKinds)];
  const uint8_t layout = input.byte(), depth = input.byte(), known = input.byte() % 3,
                bytes = input.byte() % 3, uses = input.byte();
  const auto part = [&] {
    std::string out;
    while (!input.is_empty()) {
      const uint8_t byte = input.byte();
      if (byte == 0) break;
      out += static_cast<char>(byte);
    }
    return out;
  };
  const std::string content = part().substr(0, kMostContent), before = part(), behind = part();
  Tokens tokens{{}, known};
  while (!input.is_empty() && tokens.texts.size() < kMostTokens) tokens.texts.push_back(part());
  // The vocabulary has a single-byte token for every byte, for every ASCII byte, or for no byte.
  for (int byte = 1; byte < (bytes == 0 ? 256 : bytes == 1 ? 128 : 0); ++byte)
    tokens.texts.emplace_back(1, static_cast<char>(byte));
  std::vector<const char*> texts;
  std::vector<size_t> sizes;
  for (const std::string& token : tokens.texts)
    texts.push_back(token.data()), sizes.push_back(token.size());
  const auto end = static_cast<int32_t>(texts.size());

  dlm_constraint constraint;
  dlm_constraint_init(&constraint, sizeof constraint);
  constraint.kind = kind;
  constraint.content = content.data(), constraint.content_size = content.size();
  if ((uses & 1) != 0) constraint.before = before.c_str();
  if ((uses & 2) != 0) constraint.behind = behind.c_str();
  constraint.item_separator = kItemSeparators[layout % 4];
  constraint.key_separator = kKeySeparators[layout / 4 % 4];
  constraint.indent = layout / 16 % 4 - 1;
  constraint.has_lines = layout / 64 % 2;
  constraint.max_depth = depth % 8 - 1;
  constraint.seconds = kSeconds, constraint.memory_bytes = kMemory;
  constraint.states = kStates, constraint.edges = kEdges;
  constraint.tokens = texts.data(), constraint.token_sizes = sizes.data();
  constraint.token_count = texts.size(), constraint.vocab_size = end + 2;
  constraint.eos_token_ids = &end, constraint.eos_count = 1;
  if (known != 0) constraint.first_token = first_token, constraint.user = &tokens;

  char message[512];
  dlm_automaton* automaton = nullptr;
  const int64_t allocated_before = allocated;
  most_allocated = allocated_before;
  const double started = processor_time();
  const dlm_status status =
      dlm_automaton_compile(nullptr, &constraint, message, sizeof message, &automaton);
  const double seconds = processor_time() - started;
  const int64_t memory = most_allocated - allocated_before;
  CLAIM(status == DLM_OK
            ? automaton != nullptr
            : automaton == nullptr && fuzz::is_refusal(status) && fuzz::is_sentence(message));
  CLAIM(seconds <= 2 * kSeconds + kOtherSeconds);
  CLAIM(memory <= static_cast<int64_t>(2 * kMemory + kOtherMemory));
  if (status != DLM_OK) return 0;
  const dlm_automaton_info& info = *dlm_automaton_describe(automaton);
  // The automaton may have one more state than the limit, because the state after the end token
  // does not count.
  CLAIM(info.states <= kStates + 1 && info.edges <= kEdges);
  if (kind == DLM_CONSTRAINT_DECISIONS) {  // an automaton of this kind cannot be written
    dlm_automaton_destroy(automaton);
    return 0;
  }
  const std::string file = written(automaton);
  dlm_automaton_destroy(automaton);
  dlm_constraint compiled;
  dlm_constraint_init(&compiled, sizeof compiled);
  compiled.kind = DLM_CONSTRAINT_COMPILED;
  compiled.content = file.data();
  compiled.content_size = file.size();
  CLAIM(dlm_automaton_compile(nullptr, &compiled, message, sizeof message, &automaton) == DLM_OK);
  CLAIM(written(automaton) == file);
  dlm_automaton_destroy(automaton);
  const std::string text =
      shortest_text(dlm::read_automaton(file.data(), file.size(), "the constraint"), tokens);
  const bool is_json_layout = layout % 4 != 3 && layout / 4 % 4 != 3;
  if (is_json_layout && (kind == DLM_CONSTRAINT_SCHEMA || kind == DLM_CONSTRAINT_JSON_OBJECT))
    CLAIM(is_json(std::string(constraint.before == nullptr ? "" : before) + text +
                  (constraint.behind == nullptr ? "" : behind)));
  return 0;
}
