#include "text/text_file.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/utf8.h"

namespace dlm {
namespace {

constexpr char kMagic[] = "DLMTEXT";
constexpr uint8_t kVersion = 1;
constexpr size_t kMagicBytes = 8, kPages = kCodePoints / 256;
// The largest number of code points that a text file may contain for one decomposition. The longest
// decomposition in Unicode has 4 code points.
constexpr int32_t kMostDecomposed = 18;
constexpr int32_t kMostAround = 1024, kMostRoles = 16, kMostClasses = 255;
// The largest number of splits. Released tokenizers use up to four splits.
constexpr int32_t kMostSplits = 64;
// The largest size of a token's text in bytes. Without this limit, a denoiser that repeats one long
// token could produce a text that fills the memory.
constexpr size_t kMostTokenBytes = size_t{1} << 16;

// The numbers in the header of the file, in order. Most of these numbers are the sizes of tables.
struct TextSizes {
  int32_t vocab, token_bytes, chars, merges, added, raw_added, added_bytes, classes, class_pages,
      splits, states, nfc_pages, decomposed, decomposition_points, compositions, prefix, suffix,
      flags, roles, literals, empties, strings, string_bytes;
};
constexpr size_t kSizes = sizeof(TextSizes) / sizeof(int32_t);
constexpr int32_t kHasSpaceLetter = 1, kStartsWithSpace = 2, kByteFallback = 4, kStripsSpace = 8;
constexpr int32_t kWordPieces = 16, kDropsSpace = 32;
constexpr int32_t kFlags =
    kHasSpaceLetter | kStartsWithSpace | kByteFallback | kStripsSpace | kWordPieces | kDropsSpace;

class Reader {
 public:
  Reader(const int32_t* storage, size_t size, std::string where)
      : next_(reinterpret_cast<const uint8_t*>(storage)), left_(size), where_(std::move(where)) {}

  template <class T>
  View<T> take(int64_t count) {
    const auto size = static_cast<size_t>(count);
    if (size > left_ / sizeof(T)) refuse("sizes", "are more than its bytes");
    const View<T> out{reinterpret_cast<const T*>(next_), size};
    next_ += size * sizeof(T);
    left_ -= size * sizeof(T);
    return out;
  }

  // Reads `count` numbers. Throws an error if a number is below `lowest` or above `highest`.
  Numbers numbers(const char* name, int64_t count, int32_t lowest, int32_t highest) {
    const Numbers out = take<int32_t>(count);
    for (const int32_t value : out)
      if (value < lowest || value > highest)
        fail(DLM_BAD_BUNDLE, "%s: %s holds %d, outside %d..%d", where_.c_str(), name, value, lowest,
             highest);
    return out;
  }

  // Reads `count` + 1 numbers. These numbers are the starts of `count` lists, and the end of the
  // last list. Throws an error unless the first number is 0, the last number is `total`, and no
  // number is smaller than the number before it.
  Numbers starts(const char* name, int64_t count, int32_t total) {
    const Numbers out = numbers(name, count + 1, 0, total);
    if (out[0] != 0 || out[out.size - 1] != total || !std::is_sorted(out.begin(), out.end()))
      refuse(name, "do not ascend");
    return out;
  }

  void require_ascending(const char* name, const Numbers& numbers) {
    if (std::adjacent_find(numbers.begin(), numbers.end(),
                           [](int32_t a, int32_t b) { return a >= b; }) != numbers.end())
      refuse(name, "do not ascend");
  }

  [[noreturn]] void refuse(const char* name, const char* reason) const {
    fail(DLM_BAD_BUNDLE, "%s: %s %s", where_.c_str(), name, reason);
  }
  bool is_at_end() const { return left_ == 0; }

 private:
  const uint8_t* next_;
  size_t left_;
  const std::string where_;
};

void check_sizes(const TextSizes& s, const Reader& reader) {
  int32_t sizes[kSizes];
  std::memcpy(sizes, &s, sizeof s);
  if (*std::min_element(sizes, sizes + kSizes) < 0) reader.refuse("sizes", "are negative");
  if (s.vocab < 1 || s.vocab > 1 << 24) reader.refuse("vocab_size", "is outside 1..16777216");
  if (s.raw_added > s.added || s.flags > kFlags) reader.refuse("sizes", "do not match");
  if (s.classes > kMostClasses || s.splits > kMostSplits || s.roles > kMostRoles ||
      s.prefix > kMostAround || s.suffix > kMostAround)
    reader.refuse("sizes", "are too large for a tokenizer");
  if ((s.splits > 0) != (s.class_pages > 0 && s.classes > 0))
    reader.refuse("splits", "have no classes of characters");
}

// Reads the tables of tokens, characters, merges and added texts. These are the first tables of the
// file, so this function must be called first.
void read_vocabulary(TextFile& file, const TextSizes& s, Reader& reader) {
  const int32_t last = s.vocab - 1;
  file.vocab_size = s.vocab;
  file.tokens.starts = reader.starts("token_starts", s.vocab, s.token_bytes);
  file.byte_ids = reader.numbers("byte_ids", 256, -1, last);
  file.char_points =
      reader.numbers("char_points", s.chars, 0, static_cast<int32_t>(kCodePoints) - 1);
  reader.require_ascending("char_points", file.char_points);
  file.char_ids = reader.numbers("char_ids", s.chars, 0, last);
  file.merges = reader.numbers("merges", int64_t{3} * s.merges, 0, last);
  file.added_ids = reader.numbers("added_ids", s.added, 0, last);
  file.added_flags = reader.numbers("added_flags", s.added, 0, 7);
  file.added.starts = reader.starts("added_starts", s.added, s.added_bytes);
  file.raw_added = static_cast<size_t>(s.raw_added);
}

void read_splits(TextFile& file, const TextSizes& s, Reader& reader) {
  file.class_count = s.classes;
  if (s.splits > 0)
    file.classes.pages = reader.numbers("class_pages", kPages, 0, s.class_pages - 1);
  file.split_starts = reader.starts("split_starts", s.splits, s.states);
  const int64_t width = int64_t{s.classes} + 1;
  file.split_tables = reader.take<int32_t>(s.states * width);
  for (size_t split = 0; split < static_cast<size_t>(s.splits); ++split) {
    const int32_t states = file.split_starts[split + 1] - file.split_starts[split];
    if (states < 1) reader.refuse("split_starts", "have a split without states");
    const int32_t* const first = file.split_tables.data + file.split_starts[split] * width;
    if (std::any_of(first, first + states * width,
                    [&](int32_t entry) { return entry < 0 || entry / 2 > states; }))
      reader.refuse("split_tables", "point outside their split");
  }
}

void read_composition(TextFile& file, const TextSizes& s, Reader& reader) {
  if (s.nfc_pages == 0) {
    if (s.decomposed > 0 || s.decomposition_points > 0 || s.compositions > 0)
      reader.refuse("compositions", "have no classes");
    return;
  }
  const int32_t last = static_cast<int32_t>(kCodePoints) - 1;
  file.nfc.pages = reader.numbers("nfc_pages", kPages, 0, s.nfc_pages - 1);
  file.decomposed = reader.numbers("decomposed", s.decomposed, 0, last);
  reader.require_ascending("decomposed", file.decomposed);
  file.decomposition_starts =
      reader.starts("decomposition_starts", s.decomposed, s.decomposition_points);
  for (size_t i = 0; i < file.decomposed.size; ++i)
    if (const int32_t points = file.decomposition_starts[i + 1] - file.decomposition_starts[i];
        points < 1 || points > kMostDecomposed)
      reader.refuse("decomposition_starts", "have an entry that is empty or too long");
  file.decomposition_points =
      reader.numbers("decomposition_points", s.decomposition_points, 0, last);
  if (!std::all_of(file.decomposition_points.begin(), file.decomposition_points.end(), is_scalar))
    reader.refuse("decomposition_points", "contain an invalid code point");
  file.compositions = reader.numbers("compositions", int64_t{3} * s.compositions, 0, last);
  for (size_t i = 0; i < file.compositions.size; i += 3) {
    const int32_t* const entry = file.compositions.data + i;
    if (!is_scalar(entry[2])) reader.refuse("compositions", "contain an invalid code point");
    if (i > 0 && !std::lexicographical_compare(entry - 3, entry - 1, entry, entry + 2))
      reader.refuse("compositions", "do not ascend");
  }
}

void read_chat(TextFile& file, const TextSizes& s, Reader& reader) {
  const int64_t roles = s.roles;
  const int32_t last = s.strings - 1, context = 2 * s.roles - 1;
  file.roles = reader.numbers("roles", roles, 0, last);
  file.chat_transforms = reader.numbers("chat_transforms", 2 * roles, 0, 2);
  file.chat_gaps = reader.numbers("chat_gaps", (roles + 1) * 2 * roles, -1, last);
  file.chat_ends = reader.numbers("chat_ends", roles, -1, last);
  file.literal_contexts = reader.numbers("literal_contexts", s.literals, 0, context);
  file.literals = reader.numbers("literals", s.literals, 0, last);
  file.empty_contexts = reader.numbers("empty_contexts", s.empties, 0, context);
  file.chat_strings.starts = reader.starts("string_starts", s.strings, s.string_bytes);
}

std::string_view bytes_of(Reader& reader, int32_t count) {
  const View<char> view = reader.take<char>(count);
  return {view.data, view.size};
}

void check_strings(const TextFile& file, const Reader& reader) {
  for (const Strings* const strings : {&file.added, &file.chat_strings})
    for (size_t i = 0; i < strings->size(); ++i)
      if (!is_utf8((*strings)[i])) reader.refuse("strings", "are not all UTF-8");
  for (size_t i = 0; i < file.added.size(); ++i) {
    if (file.added[i].empty()) reader.refuse("added", "contain an empty text");
    if (i > 0 && i != file.raw_added && file.added[i - 1] >= file.added[i])
      reader.refuse("added", "do not ascend");
  }
  for (const int32_t literal : file.literals)
    if (file.chat_strings[literal].empty()) reader.refuse("literals", "contain an empty text");
  for (size_t token = 0; token < file.tokens.size(); ++token) {
    const bool is_byte = (file.token_flags[token] & TextFile::byte) != 0;
    if (file.tokens[token].size() > kMostTokenBytes)
      reader.refuse("tokens", "contain a token of more than 65536 bytes");
    if (is_byte && file.tokens[token].size() != 1)
      reader.refuse("tokens", "have an invalid byte token");
    if ((file.is_byte_fallback || file.has_word_pieces) && !is_byte && !is_utf8(file.tokens[token]))
      reader.refuse("tokens", "are not all UTF-8");
  }
}

}  // namespace

TextFile read_text_file(const void* data, size_t size, const std::string& where) {
  constexpr size_t header = kMagicBytes + kSizes * sizeof(int32_t);
  const auto* const bytes = static_cast<const uint8_t*>(data);
  if (size < header || std::memcmp(bytes, kMagic, kMagicBytes - 1) != 0)
    fail(DLM_BAD_BUNDLE, "%s: not a compiled text file, or truncated", where.c_str());
  if (bytes[kMagicBytes - 1] != kVersion)
    fail(DLM_UNSUPPORTED,
         "%s: it has version %d, but this library reads version %d: build the bundle again",
         where.c_str(), bytes[kMagicBytes - 1], kVersion);
  TextFile file;
  file.storage.resize((size + sizeof(int32_t) - 1) / sizeof(int32_t));
  std::memcpy(file.storage.data(), data, size);
  TextSizes s;
  std::memcpy(&s, bytes + kMagicBytes, sizeof s);
  Reader reader(file.storage.data(), size, where);
  reader.take<uint8_t>(header);
  check_sizes(s, reader);
  read_vocabulary(file, s, reader);
  read_splits(file, s, reader);
  read_composition(file, s, reader);
  file.prefix = reader.numbers("prefix", s.prefix, 0, s.vocab - 1);
  file.suffix = reader.numbers("suffix", s.suffix, 0, s.vocab - 1);
  read_chat(file, s, reader);
  file.token_flags = reader.take<uint8_t>(s.vocab);
  file.classes.values = reader.take<uint8_t>(int64_t{256} * s.class_pages);
  for (const uint8_t value : file.classes.values)
    if (value >= s.classes) reader.refuse("classes", "have an unknown class");
  file.nfc.values = reader.take<uint8_t>(int64_t{256} * s.nfc_pages);
  file.tokens.bytes = bytes_of(reader, s.token_bytes);
  file.added.bytes = bytes_of(reader, s.added_bytes);
  file.chat_strings.bytes = bytes_of(reader, s.string_bytes);
  if (!reader.is_at_end()) reader.refuse("sizes", "are fewer than its bytes");
  file.has_space_letter = (s.flags & kHasSpaceLetter) != 0;
  file.starts_with_space = (s.flags & kStartsWithSpace) != 0;
  file.is_byte_fallback = (s.flags & kByteFallback) != 0;
  file.strips_space = (s.flags & kStripsSpace) != 0;
  file.has_word_pieces = (s.flags & kWordPieces) != 0;
  file.drops_space = (s.flags & kDropsSpace) != 0;
  if (file.has_word_pieces && (file.is_byte_fallback || file.byte_ids[0] < 0))
    reader.refuse("byte_ids", "have no unknown token");
  check_strings(file, reader);
  return file;
}

}  // namespace dlm
