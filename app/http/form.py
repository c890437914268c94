"""Parses multipart forms: the contents of their files, in order."""

import re
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.errors import MAX_SHOWN, BadParameterError, TooManyFilesError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# A file name in RFC 5987's form, which some clients send alone if it is not ASCII.
EXTENDED_FILENAME = re.compile(r";[ \t]*filename\*[0-9*]*[ \t]*=", re.IGNORECASE)
PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")
# Pages and gateways may add text fields to a form, which are ignored. A field with the name of our
# parameter is an error, since the client meant it to have an effect.
MAX_TEXTS, MAX_TEXT_BYTES = 16, 1024
PARAMETERS = (b"top_k", b"threshold", b"model_set")


class FileForm:
    """Collects the files of a form while its bytes arrive.

    Field names and file names are not used or decoded, and a ``charset`` parameter is ignored: a
    codec that the client chooses might raise anything.
    """

    def __init__(self, content_type: str, max_files: int) -> None:
        """Read the boundary from the request's Content-Type.

        Raises:
            BadParameterError: there is no boundary, or it is invalid.

        """
        _, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if not boundary:
            raise _broken(f"Content-Type {content_type[:MAX_SHOWN]!r} has no boundary")
        self._parts = _Parts(max_files)
        try:
            self._parser = MultipartParser(boundary, self._parts.callbacks())
        except FormParserError as error:
            raise _broken(str(error)) from error

    def write(self, chunk: bytes) -> None:
        """Parse the next bytes of the body.

        Raises:
            BadParameterError: the bytes are not a multipart form, or it has large or many texts.
            TooManyFilesError: there are more files than the limit.

        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(str(error)) from error

    def files(self) -> list[bytes]:
        """Return the contents of the files, after the whole body was written.

        Raises:
            BadParameterError: the form is incomplete, or has no file.

        """
        if not self._parts.are_all:
            raise _broken("it breaks off before its closing boundary")
        if not self._parts.files:
            raise BadParameterError(
                "the form has no file; send one as curl -F files=@photo.jpg does"
            )
        return self._parts.files


class _Parts:
    """The parsed parts, without a reference to the parser, which refers to this object.

    A reference cycle would keep a form's files until the garbage collector runs.
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self.are_all = False
        self.files: list[bytes] = []
        self._name, self._value = bytearray(), bytearray()  # of the current header
        self._headers: dict[str, str] = {}  # of the current part
        self._content = bytearray()  # of the current part
        self._is_file, self._num_texts = True, 0

    def callbacks(self) -> "MultipartCallbacks":
        """Return the parser's callbacks."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self._headers = {}

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value.decode("latin-1").strip()
        self._name, self._value = bytearray(), bytearray()

    def _check_headers(self) -> None:
        disposition = self._headers.get("content-disposition", "")
        _, parameters = parse_options_header(disposition)
        if b"name" not in parameters:
            raise _broken("a part has no Content-Disposition with a name")
        self._is_file = (
            b"filename" in parameters
            or EXTENDED_FILENAME.search(disposition) is not None
            or self._headers.get("content-type", "").lower().startswith("image/")
        )
        if self._is_file:
            self._check_file()
        else:
            self._check_text(parameters[b"name"])

    def _check_text(self, name: bytes) -> None:
        if name in PARAMETERS:
            raise BadParameterError(
                f"the form has a text field {name.decode()}; parameters belong in the address "
                f"(?{name.decode()}=...)"
            )
        self._num_texts += 1
        if self._num_texts > MAX_TEXTS:
            raise BadParameterError(
                f"the form has more than {MAX_TEXTS} text fields; they have no effect: send files"
            )

    def _check_file(self) -> None:
        encoding = self._headers.get("content-transfer-encoding", "")
        if encoding.lower() not in PLAIN_ENCODINGS:
            raise BadParameterError(
                f"a file has Content-Transfer-Encoding {encoding[:MAX_SHOWN]!r}, which "
                "forms do not have (RFC 7578); send its bytes as they are"
            )
        if len(self.files) == self._max_files:
            raise TooManyFilesError(
                f"more than {self._max_files} files in one request; send them in several requests"
            )

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]
        if not self._is_file and len(self._content) > MAX_TEXT_BYTES:
            raise BadParameterError(
                f"the form has a text field of more than {MAX_TEXT_BYTES} bytes; an image is sent "
                "with a file name, or with Content-Type image/..., as curl -F files=@photo.jpg does"
            )

    def _end_part(self) -> None:
        if self._is_file:
            self.files.append(bytes(self._content))
        self._content = bytearray()

    def _end_form(self) -> None:
        self.are_all = True


def _broken(reason: str) -> BadParameterError:
    return BadParameterError(
        f"this is not a multipart form: {reason}; "
        "send the image itself as the body, or files as curl -F files=@photo.jpg does"
    )
