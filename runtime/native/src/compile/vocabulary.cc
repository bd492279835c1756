#include "compile/vocabulary.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "compile/numbers.h"

namespace dlm::compile {
namespace {

constexpr size_t kKept = 8;  // cached trees by classes; each takes a few MB

// Removes nodes deeper than `depth` from a path. `node` is the first node after their subtrees.
void close(TokenTree& tree, std::vector<int32_t>& path, size_t depth, int32_t node) {
  while (path.size() > depth) {
    tree.behind[index(path.back())] = node;
    path.pop_back();
  }
}

}  // namespace

Vocabulary::Vocabulary(std::vector<std::string> tokens, int32_t vocab_size,
                       std::vector<int32_t> ends, FirstToken first_token)
    : tokens_(std::move(tokens)),
      vocab_size_(vocab_size),
      ends_(std::move(ends)),
      first_token_(std::move(first_token)) {
  if (ends_.empty())
    fail(DLM_INVALID_ARGUMENT,
         "constraints need an end token, to stand behind texts, and this bundle has none");
  for (const int32_t end : ends_)
    if (end < 0 || end >= vocab_size_)
      fail(DLM_INVALID_ARGUMENT, "the end token %d is outside the vocabulary (0..%d)", end,
           vocab_size_ - 1);
  std::vector<int32_t> order;
  for (int32_t token = 0; token < vocab_size_ && index(token) < tokens_.size(); ++token)
    if (!tokens_[index(token)].empty() &&
        std::find(ends_.begin(), ends_.end(), token) == ends_.end())
      order.push_back(token);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return tokens_[index(a)] < tokens_[index(b)]; });
  node_of_.assign(index(vocab_size_), -1);
  std::vector<int32_t> path;  // nodes of the previous text
  std::string_view before;
  for (const int32_t token : order) {
    const std::string_view text = tokens_[index(token)];
    size_t shared = 0;
    while (shared < std::min(before.size(), text.size()) && before[shared] == text[shared])
      ++shared;
    close(tree_, path, shared, tree_.size());
    for (size_t i = shared; i < text.size(); ++i) {
      path.push_back(tree_.size());
      tree_.bytes.push_back(static_cast<uint8_t>(text[i]));
      tree_.depths.push_back(static_cast<int32_t>(i) + 1);
      tree_.behind.push_back(0);
      tree_.token_starts.push_back(static_cast<int32_t>(tree_.tokens.size()));
    }
    tree_.tokens.push_back(token);
    node_of_[index(token)] = path.back();
    before = text;
  }
  close(tree_, path, 0, tree_.size());
  tree_.token_starts.push_back(static_cast<int32_t>(tree_.tokens.size()));
}

int32_t Vocabulary::first_node(std::string_view text) const {
  if (!first_token_ || text.empty()) return -1;
  const int32_t token = first_token_(text);
  if (token < 0 || token >= vocab_size_ || index(token) >= tokens_.size()) return -1;
  const std::string& spelled = tokens_[index(token)];
  return text.substr(0, spelled.size()) == spelled ? node_of_[index(token)] : -1;
}

std::shared_ptr<const TokenTree> Vocabulary::by_classes(const ByteClasses& classes,
                                                        Budget& budget) const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = kept_.begin(); at != kept_.end(); ++at)
      if (at->classes == classes) {
        kept_.splice(kept_.begin(), kept_, at);
        return at->tree;
      }
  }
  auto made = std::make_shared<const TokenTree>(collapsed(classes, budget));
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_front({classes, made});
  if (kept_.size() > kKept) kept_.pop_back();
  return made;
}

TokenTree Vocabulary::collapsed(const ByteClasses& classes, Budget& budget) const {
  TokenTree out;
  // The children of the nodes that one new node merges, sorted by class. The entries [next, last)
  // of `found` still have to be processed.
  struct Level {
    int32_t made;
    size_t next, last;
  };
  std::vector<int32_t> found, unsorted;
  std::array<size_t, 257> counts{};
  const auto class_of = [&](int32_t node) { return classes[tree_.bytes[index(node)]]; };
  // Appends the children of the nodes [first, last) to `found`, sorted by class.
  const auto open_children = [&](const int32_t* first, const int32_t* last) {
    unsorted.clear();
    counts.fill(0);
    const auto add_children = [&](int32_t child, int32_t end) {
      for (; child < end; child = tree_.behind[index(child)]) {
        budget.check();
        if (class_of(child) < 0) continue;
        unsorted.push_back(child);
        ++counts[static_cast<size_t>(class_of(child)) + 1];
      }
    };
    if (first == nullptr) add_children(0, tree_.size());
    for (; first != last; ++first) add_children(*first + 1, tree_.behind[index(*first)]);
    for (size_t i = 1; i < counts.size(); ++i) counts[i] += counts[i - 1];
    const size_t base = found.size();
    found.resize(base + unsorted.size());
    for (const int32_t child : unsorted)
      found[base + counts[static_cast<size_t>(class_of(child))]++] = child;
    return base;
  };
  std::vector<uint8_t> lowest(256, 0);  // lowest byte of each class
  for (size_t byte = 256; byte-- > 0;)
    if (classes[byte] >= 0) lowest[static_cast<size_t>(classes[byte])] = static_cast<uint8_t>(byte);
  std::vector<Level> levels;
  const size_t top = open_children(nullptr, nullptr);
  levels.push_back({-1, top, found.size()});
  while (!levels.empty()) {
    Level& level = levels.back();
    if (level.next == level.last) {
      if (level.made >= 0) out.behind[index(level.made)] = out.size();
      levels.pop_back();
      if (!levels.empty()) found.resize(levels.back().last);
      continue;
    }
    const size_t first = level.next;
    const int16_t number = class_of(found[first]);
    while (level.next < level.last && class_of(found[level.next]) == number) ++level.next;
    const size_t last = level.next;
    const int32_t made = out.size();
    out.bytes.push_back(lowest[static_cast<size_t>(number)]);
    out.depths.push_back(static_cast<int32_t>(levels.size()));
    out.behind.push_back(0);
    out.token_starts.push_back(static_cast<int32_t>(out.tokens.size()));
    out.node_starts.push_back(static_cast<int32_t>(out.nodes.size()));
    for (size_t i = first; i < last; ++i) {
      const size_t node = index(found[i]);
      out.nodes.push_back(found[i]);
      out.tokens.insert(out.tokens.end(), tree_.tokens.begin() + tree_.token_starts[node],
                        tree_.tokens.begin() + tree_.token_starts[node + 1]);
    }
    const size_t base = open_children(out.nodes.data() + out.node_starts.back(),
                                      out.nodes.data() + out.nodes.size());
    levels.push_back({made, base, found.size()});
  }
  out.token_starts.push_back(static_cast<int32_t>(out.tokens.size()));
  out.node_starts.push_back(static_cast<int32_t>(out.nodes.size()));
  return out;
}

}  // namespace dlm::compile
