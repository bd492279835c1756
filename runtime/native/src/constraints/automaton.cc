#include "constraints/automaton.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/sha256.h"

namespace dlm {
namespace {

constexpr char kMagic[] = "DLMAUTO";
constexpr uint8_t kVersion = 1;
constexpr size_t kMagicBytes = 8, kMadeOfBytes = 32, kHashBytes = 32;
constexpr size_t kLimitBytes = size_t{1} << 30;
constexpr size_t kSizes = 6;

// Returns those arrays of the automaton that are stored in its file, in the order of the file.
std::array<const std::vector<int32_t>*, 7> arrays_of(const Automaton& automaton) {
  return {&automaton.token_class, &automaton.group_starts, &automaton.group_classes,
          &automaton.edge_starts, &automaton.edge_states,  &automaton.edge_groups,
          &automaton.distances};
}

// Reads arrays of numbers from a file, and checks the numbers.
class Reader {
 public:
  Reader(const uint8_t* data, std::string where) : data_(data), where_(std::move(where)) {}

  // Reads `count` numbers. Throws an error if a number is below `lowest` or above `highest`.
  std::vector<int32_t> take(const char* name, int32_t count, int32_t lowest, int32_t highest) {
    std::vector<int32_t> out(count);
    if (count > 0) std::memcpy(out.data(), data_, out.size() * sizeof(int32_t));
    data_ += out.size() * sizeof(int32_t);
    for (const int32_t value : out)
      if (value < lowest || value > highest)
        fail(DLM_BAD_BUNDLE, "%s: %s holds %d, outside %d..%d", where_.c_str(), name, value, lowest,
             highest);
    return out;
  }

  // Reads `count` + 1 numbers. These numbers are the starts of `count` lists, and the end of the
  // last list. Throws an error unless the first number is 0, the last number is `total`, and no
  // number is smaller than the number before it.
  std::vector<int32_t> take_starts(const char* name, int32_t count, int32_t total) {
    std::vector<int32_t> out = take(name, count + 1, 0, total);
    if (out.front() != 0 || out.back() != total || !std::is_sorted(out.begin(), out.end()))
      fail(DLM_BAD_BUNDLE, "%s: %s do not go from 0 to %d", where_.c_str(), name, total);
    return out;
  }

 private:
  const uint8_t* data_;
  const std::string where_;
};

void check_groups(const Automaton& automaton, const std::string& where) {
  for (int32_t group = 0; group < automaton.groups; ++group) {
    const View<int32_t> classes = automaton.classes_of(group);
    const auto descends = [](int32_t a, int32_t b) { return a >= b; };
    if (classes.size == 0 ||
        std::adjacent_find(classes.begin(), classes.end(), descends) != classes.end())
      fail(DLM_BAD_BUNDLE, "%s: the classes of group %d do not ascend", where.c_str(), group);
  }
}

// Returns the smallest distance of the next states. If there are none, returns the largest number.
int32_t nearest(const Automaton& automaton, int32_t state) {
  int32_t least = std::numeric_limits<int32_t>::max();
  for (const auto [to, group] : automaton.edges(state))
    least = std::min(least, automaton.distances[to]);
  return least;
}

// Checks the distance of each state. The distance is the smallest number of tokens from the state
// to the end of a text. It is 0 if a text may end in the state. Any other distance must be one more
// than the smallest distance of the next states. So an end can be reached from every state.
void check_distances(const Automaton& automaton, const std::string& where) {
  for (int32_t state = 0; state < automaton.states; ++state) {
    const int32_t distance = automaton.distances[state];
    if (distance > 0 && nearest(automaton, state) != distance - 1)
      fail(DLM_BAD_BUNDLE, "%s: state %d is not %d tokens from an end, as the file claims",
           where.c_str(), state, distance);
  }
}

// Checks that, from each state, each class leads to at most one next state. Edges refer to groups
// of classes, and often many states use the same large group. So it would be slow to visit all
// classes of each state's largest group. Instead, the check visits only the classes of the state's
// other groups, and tests if the largest group contains them. With this method, the check is almost
// as fast as reading the edges.
void check_edges(const Automaton& automaton, const std::string& where) {
  // For each class: the last visited state that has an edge with this class.
  std::vector<int32_t> seen(static_cast<size_t>(automaton.classes), -1);
  for (int32_t state = 0; state < automaton.states; ++state) {
    size_t most = 0;
    int32_t largest = -1;
    for (const auto [to, group] : automaton.edges(state))
      if (const size_t size = automaton.classes_of(group).size; size > most)
        most = size, largest = group;
    bool is_met = false;  // true after the loop has skipped the edge of the largest group
    for (const auto [to, group] : automaton.edges(state)) {
      if (group == largest && !std::exchange(is_met, true)) continue;
      for (const int32_t number : automaton.classes_of(group))
        if (std::exchange(seen[number], state) == state || automaton.has_class(largest, number))
          fail(DLM_BAD_BUNDLE,
               "%s: state %d has two edges for class %d, so its texts are ambiguous: compile the "
               "constraint again",
               where.c_str(), state, number);
    }
  }
}

}  // namespace

int32_t Automaton::next(int32_t state, int32_t token) const {
  const int32_t number = token_class[token];
  if (number < 0) return -1;
  for (const auto [to, group] : edges(state))
    if (has_class(group, number)) return to;
  return -1;
}

bool Automaton::has_class(int32_t group, int32_t number) const {
  const View<int32_t> classes = classes_of(group);
  return std::binary_search(classes.begin(), classes.end(), number);
}

bool Automaton::has_token(int32_t group, int32_t token) const {
  return token >= 0 && token_class[token] >= 0 && has_class(group, token_class[token]);
}

void complete_tables(Automaton& automaton) {
  automaton.is_padded = true;
  for (int32_t state = 0; state < automaton.states; ++state)
    if (automaton.distances[state] == 0)
      automaton.is_padded = automaton.is_padded && nearest(automaton, state) == 0;
  std::vector<int32_t>& starts = automaton.class_starts;
  starts.assign(static_cast<size_t>(automaton.classes) + 1, 0);
  for (const int32_t number : automaton.token_class)
    if (number >= 0) ++starts[number + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  automaton.class_tokens.resize(starts.back());
  std::vector<int32_t> next(starts);
  for (int32_t token = 0; token < automaton.vocab_size; ++token)
    if (const int32_t number = automaton.token_class[token]; number >= 0)
      automaton.class_tokens[next[number]++] = token;
}

size_t file_size(const Automaton& automaton) {
  size_t numbers = kSizes;
  for (const auto* const each : arrays_of(automaton)) numbers += each->size();
  return kMagicBytes + numbers * sizeof(int32_t) + kMadeOfBytes + kHashBytes;
}

std::vector<uint8_t> write_automaton(const Automaton& automaton) {
  std::vector<uint8_t> out(kMagic, kMagic + kMagicBytes - 1);
  out.reserve(file_size(automaton));
  out.push_back(kVersion);
  const auto put = [&](const std::vector<int32_t>& numbers) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(numbers.data());
    out.insert(out.end(), bytes, bytes + numbers.size() * sizeof(int32_t));
  };
  put({automaton.vocab_size, automaton.states, automaton.classes, automaton.groups,
       static_cast<int32_t>(automaton.group_classes.size()),
       static_cast<int32_t>(automaton.edge_states.size())});
  out.insert(out.end(), automaton.made_of.begin(), automaton.made_of.end());
  for (const auto* const numbers : arrays_of(automaton)) put(*numbers);
  Sha256 hash;
  hash.update(out.data(), out.size());
  const std::array<uint8_t, kHashBytes> digest = hash.digest();
  out.insert(out.end(), digest.begin(), digest.end());
  return out;
}

Automaton read_automaton(const void* data, size_t size, const std::string& where) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  constexpr size_t header = kMagicBytes + kSizes * sizeof(int32_t) + kMadeOfBytes;
  if (size < header + kHashBytes || std::memcmp(bytes, kMagic, kMagicBytes - 1) != 0)
    fail(DLM_BAD_BUNDLE, "%s: not a compiled constraint, or truncated", where.c_str());
  if (bytes[kMagicBytes - 1] != kVersion)
    fail(DLM_UNSUPPORTED,
         "%s: the automaton has version %d, but this library reads version %d: compile the "
         "constraint again",
         where.c_str(), bytes[kMagicBytes - 1], kVersion);
  Sha256 hash;
  hash.update(bytes, size - kHashBytes);
  const std::array<uint8_t, kHashBytes> digest = hash.digest();
  if (std::memcmp(digest.data(), bytes + size - kHashBytes, kHashBytes) != 0)
    fail(DLM_BAD_BUNDLE,
         "%s: the file is damaged: its SHA-256 does not match. Compile the constraint again",
         where.c_str());
  std::array<int32_t, kSizes> sizes;
  std::memcpy(sizes.data(), bytes + kMagicBytes, sizeof sizes);
  const auto [vocab_size, states, classes, groups, members, edges] = sizes;
  uint64_t numbers = 2;  // group_starts and edge_starts each have one extra element
  for (const int32_t count : {vocab_size, groups, members, states, states, edges, edges}) {
    if (count < 0) fail(DLM_BAD_BUNDLE, "%s: a size of %d", where.c_str(), count);
    numbers += static_cast<uint64_t>(count);
  }
  if (vocab_size < 1 || states < 1 || classes < 0 || classes > vocab_size ||
      numbers * sizeof(int32_t) != size - header - kHashBytes)
    fail(DLM_BAD_BUNDLE, "%s: its sizes do not fit its %zu bytes", where.c_str(), size);
  Automaton out{};
  out.vocab_size = vocab_size, out.states = states, out.classes = classes, out.groups = groups;
  std::memcpy(out.made_of.data(), bytes + header - kMadeOfBytes, kMadeOfBytes);
  Reader reader(bytes + header, where);
  out.token_class = reader.take("token_class", vocab_size, -1, classes - 1);
  out.group_starts = reader.take_starts("group_starts", groups, members);
  out.group_classes = reader.take("group_classes", members, 0, classes - 1);
  out.edge_starts = reader.take_starts("edge_starts", states, edges);
  out.edge_states = reader.take("edge_states", edges, 0, states - 1);
  out.edge_groups = reader.take("edge_groups", edges, 0, groups - 1);
  out.distances = reader.take("distances", states, 0, states);
  check_groups(out, where);
  check_edges(out, where);
  check_distances(out, where);
  complete_tables(out);
  if (std::adjacent_find(out.class_starts.begin(), out.class_starts.end()) !=
      out.class_starts.end())
    fail(DLM_BAD_BUNDLE, "%s: a class has no tokens", where.c_str());
  return out;
}

Automaton open_automaton(const std::string& path) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0)
    fail(DLM_NOT_FOUND, "%s: %s", path.c_str(), std::strerror(errno));
  if (!S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) > kLimitBytes)
    fail(DLM_BAD_BUNDLE, "%s: not a plain file of at most %zu bytes", path.c_str(), kLimitBytes);
  std::vector<char> data(static_cast<size_t>(info.st_size));
  std::ifstream file(path, std::ios::binary);
  if (!file.read(data.data(), static_cast<std::streamsize>(data.size())))
    fail(DLM_BAD_BUNDLE, "%s: cannot be read", path.c_str());
  return read_automaton(data.data(), data.size(), path);
}

}  // namespace dlm
