"""The formats of strings that are enforced, as patterns. Each matches a part of what its standard allows, and no more.

Left out is what a pattern cannot tell or a model has no use for: leap seconds, names of hosts in other alphabets,
comments in addresses. Lengths are bounded, so that an output ends.
"""

from collections.abc import Mapping
from types import MappingProxyType

# RFC 3339, with real calendar days: the 29th of February only in leap years; no year 0000.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOURS})"

# RFC 3339, appendix A: units in order, none left out between two.
_N = "[0-9]{1,6}"
_TIME_OF_DURATION = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DATE_OF_DURATION = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_N}W|{_DATE_OF_DURATION}(?:{_TIME_OF_DURATION})?|{_TIME_OF_DURATION})"

# RFC 1123: at most 63 characters between dots and 253 in all; letters first, so that none reads as an address.
_LONG_LABEL = "[a-zA-Z0-9]{1,15}(?:-[a-zA-Z0-9]{1,15}){0,3}"
_SHORT_LABEL = "[a-zA-Z0-9]{1,10}(?:-[a-zA-Z0-9]{1,10})?"
_LAST_LABEL = "[a-zA-Z]{1,15}(?:-[a-zA-Z0-9]{1,15}){0,3}"
_HOSTNAME = f"(?:(?:{_LONG_LABEL}\\.){{0,2}}|(?:{_SHORT_LABEL}\\.){{3,8}}){_LAST_LABEL}"

# RFC 5321, 4.1.2: a dot-string of at most 64 characters at a host.
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOSTNAME}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"

# RFC 4291: eight groups, or up to seven with a gap somewhere.
_GROUP = "[0-9a-fA-F]{1,4}"


def _with_gap(left: int) -> str:
    before = f"{_GROUP}(?::{_GROUP}){{{left - 1}}}" if left else ""
    return f"{before}::" + (f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}})?" if left < 7 else "")


_IPV6 = "(?:" + "|".join([f"(?:{_GROUP}:){{7}}{_GROUP}", *map(_with_gap, range(8))]) + ")"

_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# RFC 3986, in its common shapes: //authority/path or a path, then a query and a fragment.
_CHARACTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_HOST = f"(?:\\[{_IPV6}\\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}}){{0,253}})"
_USER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2}){1,64}"
_AUTHORITY = f"(?:{_USER}@)?{_HOST}(?::[0-9]{{1,5}})?"
_TAIL = f"(?:{_CHARACTER}|[/?])*"
_PATH = f"(?://{_AUTHORITY}(?:/{_CHARACTER}*)*|/?{_CHARACTER}+(?:/{_CHARACTER}*)*)"
_URI = f"[a-zA-Z][a-zA-Z0-9+.-]{{0,30}}:{_PATH}(?:\\?{_TAIL})?(?:#{_TAIL})?"

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        name: f"^(?:{pattern})$"
        for name, pattern in {
            "date-time": f"{_DATE}T{_TIME}",
            "date": _DATE,
            "time": _TIME,
            "duration": _DURATION,
            "email": _EMAIL,
            "hostname": _HOSTNAME,
            "ipv4": _IPV4,
            "ipv6": _IPV6,
            "uuid": _UUID,
            "uri": _URI,
        }.items()
    }
)
