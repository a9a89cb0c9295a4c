// PTX text to tokens.
#pragma once

#include <string>
#include <vector>

namespace ptx_emulator {

struct Token {
    enum class Kind { kWord, kNumber, kString, kPunctuation, kEnd };
    Kind kind = Kind::kEnd;
    std::string text;  // kString: without the quotes
    int line = 0;      // 1-based line of the PTX text

    bool is(const char* s) const { return (kind == Kind::kWord || kind == Kind::kPunctuation) && text == s; }
};

// A word is an identifier, a directive or an opcode with all its modifiers ("ld.shared::cta.v4.u32", "%tid.x",
// ".reg"). Throws EmulationError(kInvalidPtx) on a character no token starts with. The last token is kEnd.
std::vector<Token> tokenize(const std::string& text);

}  // namespace ptx_emulator
