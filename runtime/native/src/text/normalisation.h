// Normalises Unicode text. compose() converts text to its composed form (NFC, Unicode annex 15).
// rewrite() normalises text as BERT does. Both functions use the tables of a bundle's text file.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// Writes the composed form of `text` to `out`, and returns true. If a quick check shows that `text`
// is already composed, returns false and does not change `out`. `file` must contain the NFC tables.
bool compose(const TextFile& file, std::string_view text, std::string& out);

// Normalises `text` as BERT's normaliser does, and writes the result to `out`. `file` must contain
// WordPiece tables.
void rewrite(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
