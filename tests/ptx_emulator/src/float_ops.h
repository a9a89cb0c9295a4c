// Decode functions of floating-point forms of mnemonics that integers share.
#pragma once

#include "decoder.h"

namespace ptx_emulator {

void decode_float_binary(DecodeContext& context);  // add sub mul div min max
void decode_float_unary(DecodeContext& context);   // neg abs
void decode_fma(DecodeContext& context);           // fma, mad.rn.f32

}  // namespace ptx_emulator
