#include "compile/tokens/vocabulary.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {

// The largest total size of the sets that keep_sets() stores, in bytes.
constexpr size_t kKeptBytes = size_t{32} << 20;

// Shortens a path in the token tree to `depth` nodes. `node` is the first node after the subtree of
// each removed node. The function stores it in `behind` of the removed nodes.
void close(TokenTree& tree, std::vector<int32_t>& path, size_t depth, int32_t node) {
  while (path.size() > depth) {
    tree.behind[index(path.back())] = node;
    path.pop_back();
  }
}

// Returns true for tokens with bytes that occur in no text, such as a token for a single byte.
bool is_invalid(std::string_view text) {
  return text.find(kTextStart) != std::string_view::npos ||
         text.find(kNamed, text.size() > 1 ? 1 : 0) != std::string_view::npos;
}

}  // namespace

Vocabulary::Vocabulary(std::vector<std::string> tokens, std::vector<std::string> starts,
                       int32_t vocab_size, std::vector<int32_t> ends, FirstToken first_token)
    : tokens_(std::move(tokens)),
      starts_(std::move(starts)),
      vocab_size_(vocab_size),
      ends_(std::move(ends)),
      first_token_(std::move(first_token)) {
  for (const int32_t end : ends_)
    if (end < 0 || end >= vocab_size_)
      fail(DLM_INVALID_ARGUMENT, "the end token %d is outside the vocabulary (0..%d)", end,
           vocab_size_ - 1);
  for (std::string& start : starts_) start.insert(start.begin(), kTextStart);
  std::vector<Entry> entries;
  for (int32_t token = 0; token < vocab_size_ && index(token) < tokens_.size(); ++token) {
    const std::string& text = tokens_[index(token)];
    if (text.empty() || is_invalid(text) ||
        std::find(ends_.begin(), ends_.end(), token) != ends_.end())
      continue;
    entries.push_back({tokens_[index(token)], token, false});
    if (has_starts()) entries.push_back({starts_[index(token)], token, true});
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.text < b.text; });
  add(entries);
}

void Vocabulary::add(const std::vector<Entry>& entries) {
  node_of_.assign(index(vocab_size_), -1);
  start_node_of_.assign(index(vocab_size_), -1);
  std::vector<int32_t> path;  // the tree nodes of all prefixes of the previous text
  std::string_view before;
  for (const auto& [text, token, is_start] : entries) {
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
    (is_start ? start_node_of_ : node_of_)[index(token)] = path.back();
    before = text;
  }
  close(tree_, path, 0, tree_.size());
  tree_.token_starts.push_back(static_cast<int32_t>(tree_.tokens.size()));
}

int32_t Vocabulary::first_node(std::string_view text) const {
  if (!first_token_ || text.empty()) return -1;
  text = text.substr(0, text.find(kNamed));
  if (text.empty()) return -1;
  const bool is_start = text.front() == kTextStart;
  const int32_t token = first_token_(text.substr(is_start ? 1 : 0), is_start || !has_starts());
  if (token < 0 || token >= vocab_size_ || index(token) >= tokens_.size()) return -1;
  const std::string& spelled = (is_start ? starts_ : tokens_)[index(token)];
  if (text.substr(0, spelled.size()) != spelled) return -1;
  return (is_start ? start_node_of_ : node_of_)[index(token)];
}

std::unique_ptr<TokenSets> Vocabulary::take_sets() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_ != nullptr) return std::move(kept_);
  }
  return std::make_unique<TokenSets>(tree_);
}

void Vocabulary::keep_sets(std::unique_ptr<TokenSets> sets) const {
  if (sets->bytes() > kKeptBytes) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_ = std::move(sets);
}

}  // namespace dlm::compile
