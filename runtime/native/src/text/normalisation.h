// Canonical composition of Unicode text (NFC, annex 15 of the standard), with a text file's tables.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// Composes `text` into `out`; returns false if it is already composed. `file` must have the tables.
bool compose(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
