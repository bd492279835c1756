#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"
#include "text/normalisation.h"
#include "text/tokenizer.h"

namespace dlm {
namespace {

// The largest number of slots of a hash table that one insertion may probe. A few dozen probes are
// enough, unless an attacker chose the keys so that they collide.
constexpr size_t kMostProbes = 1024;
// The largest number of steps that a split may take for each byte of the text. A split is a regular
// expression that cuts text into pieces.
constexpr size_t kStepsPerChar = 64;
// In WordPiece, a word with more than kLongestWord characters becomes the unknown token.
constexpr size_t kLongestWord = 100;
constexpr std::string_view kSpaceLetter = "\xE2\x96\x81";  // U+2581 in UTF-8

uint64_t mixed(uint64_t value) {
  value *= 0x9E3779B97F4A7C15;
  return value ^ value >> 29;
}

uint64_t hash_of(int32_t left, int32_t right) {
  return mixed(static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 |
               static_cast<uint32_t>(right));
}

uint64_t hash_of(std::string_view text) {
  uint64_t hash = text.size();
  while (text.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, text.data(), 8);
    hash = mixed(hash ^ word);
    text.remove_prefix(8);
  }
  uint64_t word = 0;
  if (!text.empty()) std::memcpy(&word, text.data(), text.size());
  return mixed(mixed(hash ^ word));
}

uint64_t piece_hash(std::string_view text, bool continues) {
  return hash_of(text) ^ (continues ? 1 : 0);
}

// Returns the offset where the white space at the end of `text` starts.
size_t space_before(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (continues_char(text[start])) --start;
    size_t at = start;
    if (!is_space(next_char(text, at))) break;
    end = start;
  }
  return end;
}

// Returns the size of the white space at the start of `text`, in bytes.
size_t space_behind(std::string_view text) {
  size_t end = 0;
  for (size_t at = 0; at < text.size() && is_space(next_char(text, at));) end = at;
  return end;
}

}  // namespace

void Index::reserve(size_t count) {
  size_t slots = 1;
  while (slots < 2 * count + 1) slots *= 2;
  slots_.assign(slots, -1);
  mask_ = slots - 1;
}

void Index::insert(uint64_t hash, int32_t number) {
  size_t slot = hash & mask_;
  for (size_t probes = 0; slots_[slot] >= 0; slot = (slot + 1) & mask_)
    if (++probes > kMostProbes)
      fail(DLM_BAD_BUNDLE, "it has more hash collisions than chance explains");
  slots_[slot] = number;
}

Text::Text(const void* data, size_t size, const std::string& where)
    : file_(read_text_file(data, size, where)), where_(where) {
  try {
    const Numbers& merges = file_.merges;
    merges_.reserve(merges.size / 3);
    for (size_t i = 0; i < merges.size / 3; ++i)
      merges_.insert(hash_of(merges[3 * i], merges[3 * i + 1]), static_cast<int32_t>(i));
    const auto is_whole = [](uint8_t flags) { return (flags & TextFile::whole) != 0; };
    wholes_.reserve(std::count_if(file_.token_flags.begin(), file_.token_flags.end(), is_whole));
    for (size_t at = 0; at < file_.tokens.size(); ++at) {
      const auto token = static_cast<int32_t>(at);
      if (!is_whole(file_.token_flags[at])) continue;
      wholes_.insert(file_.has_word_pieces ? piece_hash(piece(token), continues(token))
                                           : hash_of(file_.tokens[at]),
                     token);
    }
  } catch (const Error& error) {
    throw Error(error.status(), where + ": " + error.what());
  }
  for (size_t i = 0; i < file_.added.size(); ++i)
    starts_added_[i < file_.raw_added ? 0 : 1][static_cast<uint8_t>(file_.added[i][0])] = 1;
}

// The working data of one call of Text::encode or Text::encode_chat.
class Encoding {
 public:
  // `chat` is the rendered chat, which determines where special tokens are recognised. `chat` is
  // nullptr for text that is not a chat.
  Encoding(const Text& text, Encode how, const RenderedChat* chat, std::vector<int32_t>& out)
      : text_(text),
        file_(text.file_),
        special_tokens_(how.special_tokens),
        adds_space_(text.file_.starts_with_space && !how.follows_text),
        chat_(chat),
        out_(out) {}

  void run(std::string_view whole) {
    split_added(whole, 0, [&](std::string_view given) {
      const std::string_view made = normalised(given);
      piece_start_ = static_cast<size_t>(given.data() - whole.data()), piece_size_ = given.size();
      is_changed_ = made.data() != given.data();
      split_added(made, 1, [&](std::string_view piece) { split(piece, 0); });
    });
  }

 private:
  // Finds the texts of added tokens in `text`, and appends the ids of these tokens. Calls `piece`
  // for each other part of `text`.
  template <class Piece>
  void split_added(std::string_view text, size_t stage, Piece piece) {
    const uint8_t* const starts = text_.starts_added_[stage];
    const size_t first = stage == 0 ? 0 : file_.raw_added,
                 last = stage == 0 ? file_.raw_added : file_.added.size();
    size_t done = 0;
    for (size_t at = 0; first < last && at < text.size();) {
      const bool is_start = starts[static_cast<uint8_t>(text[at])] != 0;
      const size_t found = is_start ? longest_added(text.substr(at), first, last) : last;
      if (found == last) {
        ++at;
        continue;
      }
      size_t start = at, end = at += file_.added[found].size();
      if (text_.is_special(file_.added_ids[found]) && is_ordinary(stage, start, end)) continue;
      const int32_t flags = file_.added_flags[found];
      if ((flags & TextFile::strips_left) != 0)
        start = std::max(space_before(text.substr(0, start)), done);
      if ((flags & TextFile::strips_right) != 0) end += space_behind(text.substr(end));
      if (done < start) piece(text.substr(done, start - done));
      out_.push_back(file_.added_ids[found]);
      done = end;
    }
    if (done < text.size()) piece(text.substr(done));
  }

  // The bytes from `start` to `end` - 1 are the text of a special token. Returns true if this text
  // must be encoded as ordinary text.
  bool is_ordinary(size_t stage, size_t start, size_t end) const {
    if (chat_ == nullptr) return !special_tokens_;
    if (stage == 0) return touches_content(start, end);
    if (!is_changed_) return touches_content(piece_start_ + start, piece_start_ + end);
    if (touches_content(piece_start_, piece_start_ + piece_size_))
      fail(DLM_UNSUPPORTED,
           "%s: the chat has a special token in text that was normalised together with a message's "
           "content. Pass the chat's tokens instead, or use Python",
           text_.where_.c_str());
    return false;
  }

  bool touches_content(size_t start, size_t end) const {
    const auto& contents = chat_->contents;
    const auto is_before = [&](const std::pair<size_t, size_t>& each) {
      return each.second <= start;
    };
    const auto found = std::partition_point(contents.begin(), contents.end(), is_before);
    return found != contents.end() && found->first < end;
  }

  // An added text is the text of an added token. Returns the index of the longest added text with
  // which `text` starts. Searches the indices from `first` to `last` - 1. Returns `last` if there
  // is no such text.
  size_t longest_added(std::string_view text, size_t first, size_t last) const {
    size_t found = last;
    for (size_t length = 1; first < last && length <= text.size(); ++length) {
      // Added texts are sorted. So all added texts that start with the same bytes are neighbours,
      // and the shortest of them comes first.
      const auto next = static_cast<uint8_t>(text[length - 1]);
      const auto bound = [&](bool is_upper) {
        size_t low = first, high = last;
        while (low < high) {
          const size_t middle = (low + high) / 2;
          const auto byte = static_cast<uint8_t>(file_.added[middle][length - 1]);
          if (byte < next || (is_upper && byte == next))
            low = middle + 1;
          else
            high = middle;
        }
        return low;
      };
      const size_t low = bound(false);
      last = bound(true);
      first = low;
      if (first < last && file_.added[first].size() == length) found = first++;
    }
    return found;
  }

  std::string_view normalised(std::string_view text) {
    if (text.empty()) return text;
    if (file_.has_word_pieces && file_.nfc.pages.size > 0) {
      rewrite(file_, text, composed_);
      return composed_;
    }
    if (file_.nfc.pages.size > 0 && compose(file_, text, composed_)) text = composed_;
    if (!file_.has_space_letter && !adds_space_) return text;
    spaced_ = adds_space_ ? " " : "";
    for (size_t at = 0; at < text.size();) {
      const size_t next =
          file_.has_space_letter ? std::min(text.find(kSpaceLetter, at), text.size()) : text.size();
      spaced_.append(text, at, next - at);
      if (next < text.size()) spaced_ += ' ';
      at = next + kSpaceLetter.size();
    }
    return spaced_;
  }

  // Cuts `text` into pieces with the split (regular expression) that has the index `number`, and
  // with all later splits. Encodes the pieces.
  void split(std::string_view text, size_t number) {
    if (number + 1 == file_.split_starts.size) return merge(text);
    const auto width = static_cast<size_t>(file_.class_count) + 1;
    const int32_t* const table = file_.split_tables.data + file_.split_starts[number] * width;
    size_t done = 0, steps = 0;
    const size_t most_steps = kStepsPerChar * (text.size() + 1);
    for (size_t at = 0; at < text.size();) {
      size_t end = at, state = 0;
      for (size_t next = at;; ++steps) {
        const size_t before = next;
        const bool is_end = next == text.size();
        const size_t column = is_end ? width - 1 : file_.classes[next_char(text, next)];
        const auto entry = static_cast<size_t>(table[state * width + column]);
        if ((entry & 1) != 0) end = before;
        if (entry < 2 || is_end) break;
        state = entry / 2 - 1;
      }
      if (steps > most_steps)
        fail(DLM_BAD_BUNDLE, "%s: split %zu takes more than %zu steps per byte of this text",
             text_.where_.c_str(), number, kStepsPerChar);
      if (end == at) {
        at += char_bytes(text[at]);  // no match starts at this character
        continue;
      }
      if (done < at) split(text.substr(done, at - done), number + 1);
      split(text.substr(at, end - at), number + 1);
      done = at = end;
    }
    if (done < text.size()) split(text.substr(done), number + 1);
  }

  int32_t merge_of(int32_t left, int32_t right) const {
    const int32_t* const merges = file_.merges.data;
    return text_.merges_.find(hash_of(left, right), [&](size_t number) {
      const int32_t* const entry = merges + 3 * number;
      return entry[0] == left && entry[1] == right;
    });
  }

  // Encodes a piece with byte pair encoding. Each step merges one pair of neighbouring tokens. The
  // step chooses the pair that comes first in the list of merges. If this pair occurs several
  // times, the step merges the leftmost occurrence.
  void merge(std::string_view text) {
    if (file_.has_word_pieces) return cut_word(text);
    const int32_t whole = text_.wholes_.find(
        hash_of(text), [&](int32_t token) { return file_.tokens[token] == text; });
    if (whole >= 0) return put(whole);
    start_symbols(text);
    heap_.clear();
    const size_t count = symbols_.size();
    for (size_t i = 0; i + 1 < count; ++i) offer(i, false);
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const uint64_t top = heap_.back();
      heap_.pop_back();
      const auto at = static_cast<size_t>(top & 0xFFFFFFFF);
      Symbol& left = symbols_[at];
      if (left.merge != static_cast<int32_t>(top >> 32))
        continue;  // one of the two tokens was already merged
      const size_t behind = left.next;
      left.id = file_.merges[3 * static_cast<size_t>(left.merge) + 2];
      left.next = symbols_[behind].next;
      symbols_[behind].id = symbols_[behind].merge = -1;
      if (left.next < count) symbols_[left.next].previous = static_cast<uint32_t>(at);
      offer(at, true);
      if (at > 0) offer(left.previous, true);
    }
    for (size_t i = 0; i < count; i = symbols_[i].next) put(symbols_[i].id);
  }

  // Encodes a word with WordPiece. Each step appends the longest token with which the rest of the
  // word starts. If there is no such token, the whole word becomes the unknown token.
  void cut_word(std::string_view word) {
    size_t start = 0;
    if (file_.drops_space && is_space(next_char(word, start))) return;
    const size_t before = out_.size();
    const size_t chars = count_chars(word);
    for (start = 0; start < word.size() && chars <= kLongestWord;) {
      int32_t found = -1;
      size_t end = word.size();
      for (; end > start; --end) {
        if (end < word.size() && continues_char(word[end])) continue;  // inside a character
        found = piece_of(word.substr(start, end - start), start > 0);
        if (found >= 0) break;
      }
      if (found < 0) break;
      put(found);
      start = end;
    }
    if (start == word.size()) return;
    out_.resize(before);
    // The unknown token is always allowed, even if it is a special token.
    out_.push_back(file_.byte_ids[0]);
  }

  // Returns the token with this text, or -1. `continues` says whether the token continues a word.
  int32_t piece_of(std::string_view text, bool continues) const {
    return text_.wholes_.find(piece_hash(text, continues), [&](int32_t token) {
      return text_.continues(token) == continues && text_.piece(token) == text;
    });
  }

  // Appends an id. Throws an error if special tokens are not allowed and the id belongs to a
  // special token. Byte pair merges can produce the id of a special token if the vocabulary also
  // contains the text of the special token as an ordinary token.
  void put(int32_t id) {
    if (!special_tokens_ && text_.is_special(id))
      fail(DLM_INVALID_ARGUMENT,
           "the text has the special token %s, and the vocabulary has no ordinary tokens for it: "
           "change the text, or allow special tokens in it",
           json::quoted(file_.tokens[id]).c_str());
    out_.push_back(id);
  }

  void start_symbols(std::string_view text) {
    symbols_.clear();
    const auto put = [&](int32_t id) {
      const auto at = static_cast<uint32_t>(symbols_.size());
      if (id >= 0) symbols_.push_back({id, -1, at - 1, at + 1});
    };
    if (file_.char_points.size == 0) {
      for (const char each : text) put(file_.byte_ids[static_cast<uint8_t>(each)]);
      return;
    }
    for (size_t at = 0; at < text.size();) {
      const size_t start = at;
      const auto point = static_cast<int32_t>(next_char(text, at));
      const int32_t* const found =
          std::lower_bound(file_.char_points.begin(), file_.char_points.end(), point);
      if (found != file_.char_points.end() && *found == point) {
        put(file_.char_ids[found - file_.char_points.begin()]);
        continue;
      }
      for (size_t i = start; i < at; ++i) put(file_.byte_ids[static_cast<uint8_t>(text[i])]);
    }
  }

  // If the symbol at index `at` can be merged with the next symbol, adds this merge to the queue.
  void offer(size_t at, bool is_heap) {
    Symbol& left = symbols_[at];
    left.merge = left.next < symbols_.size() ? merge_of(left.id, symbols_[left.next].id) : -1;
    if (left.merge < 0) return;
    heap_.push_back(static_cast<uint64_t>(static_cast<uint32_t>(left.merge)) << 32 | at);
    if (is_heap) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  struct Symbol {
    // `merge` is the index of the merge with the next symbol, or -1 if there is no such merge.
    int32_t id, merge;
    uint32_t previous, next;
  };

  const Text& text_;
  const TextFile& file_;
  const bool special_tokens_, adds_space_;
  const RenderedChat* const chat_;
  std::vector<int32_t>& out_;
  // The offset and the size, in bytes, of the part of the text that was normalised last.
  size_t piece_start_ = 0, piece_size_ = 0;
  bool is_changed_ = false;  // true if normalisation changed this part
  std::string composed_, spaced_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;
};

namespace {

void check(std::string_view text) {
  if (text.size() > kMostTextBytes)
    fail(DLM_INVALID_ARGUMENT, "the text has %zu bytes, more than the limit of %zu", text.size(),
         kMostTextBytes);
  Utf8Start start{};
  for (size_t at = 0; at < text.size(); at += start.bytes)
    if ((start = utf8_start(text.substr(at))).kind != Utf8Start::whole)
      fail(DLM_INVALID_ARGUMENT, "the text is not UTF-8: byte %zu starts no whole character", at);
}

}  // namespace

void Text::encode(std::string_view text, Encode how, std::vector<int32_t>& out) const {
  check(text);
  if (how.is_prompt) out.insert(out.end(), file_.prefix.begin(), file_.prefix.end());
  Encoding(*this, how, nullptr, out).run(text);
  if (how.is_prompt) out.insert(out.end(), file_.suffix.begin(), file_.suffix.end());
}

void Text::encode_chat(const RenderedChat& chat, std::vector<int32_t>& out) const {
  check(chat.text);
  Encoding(*this, {}, &chat, out).run(chat.text);
}

}  // namespace dlm
